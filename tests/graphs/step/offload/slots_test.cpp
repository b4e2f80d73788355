// Slots for the uses of offloaded buffers, and the transfers that fill them.
#include "graphs/step/offload/pass/slots.hpp"

#include <catch2/catch_test_macros.hpp>
#include <set>

#include "engine/base/error.hpp"
#include "engine/run/storage.hpp"
#include "graphs/step/offload/pass/transfers.hpp"

namespace sg = stepgraph;
using sg::offload::HomeTable;
using sg::offload::none;
using sg::offload::Use;
using sg::offload::UsedBuffer;

namespace {

// Units of one buffer each, which are used one after another: use i has the nodes 10 i to 10 i + 5.
struct Homes {
  sg::Graph graph;
  HomeTable table;
  std::vector<Use> uses;
  explicit Homes(const std::vector<std::int64_t>& sizes, sg::Space space = sg::Space::pinned) {
    for (const std::int64_t size : sizes) {
      const auto number      = static_cast<std::uint32_t>(table.homes.size());
      const std::string name = sg::str("w", number);
      sg::offload::KnownHome home;
      home.buffer = home.home = graph.buffer({.name       = name,
                                              .size_bytes = size,
                                              .type       = sg::DType::f32,
                                              .space      = space,
                                              .lifetime   = sg::Lifetime::persistent});
      home.elements           = size / 4;
      home.space              = space;
      home.unit               = number;
      home.bytes              = size;
      home.lifetime           = sg::Lifetime::persistent;
      table.homes.push_back(home);
      table.units.push_back({.name = name});
      const sg::offload::ByteSet all(sg::ByteInterval{0, size});
      uses.push_back({.unit    = number,
                      .first   = 10 * number,
                      .last    = 10 * number + 5,
                      .buffers = {UsedBuffer{.home = number, .accessed = all, .fill = all, .back = all}}});
    }
  }
  [[nodiscard]] std::vector<std::uint32_t> slots() const {
    std::vector<std::uint32_t> found;
    for (const Use& use : uses) found.push_back(use.slot);
    return found;
  }
};

}  // namespace

TEST_CASE("uses take slots in turn, and a slot is as large as its largest tenant", "[graphs][offload]") {
  Homes homes({400, 800, 600, 200, 400});
  const auto slots = assign_slots(homes.graph, homes.table, homes.uses, {.slots = 2});
  CHECK(homes.slots() == std::vector<std::uint32_t>{0, 1, 0, 1, 0});
  REQUIRE(slots.size() == 2);
  CHECK(homes.graph.spec(slots[0]).size_bytes == 600);
  CHECK(homes.graph.spec(slots[1]).size_bytes == 800);
  CHECK(homes.graph.spec(slots[0]).space == sg::Space::device);
  CHECK(homes.graph.spec(slots[0]).lifetime == sg::Lifetime::step);
}

TEST_CASE("uses that overlap have slots of their own, also where there are fewer", "[graphs][offload]") {
  Homes homes({400, 400, 400});
  homes.uses[0].last = 25;
  homes.uses[1].last = 25;
  CHECK(assign_slots(homes.graph, homes.table, homes.uses, {.slots = 1}).size() == 3);
  CHECK(std::set<std::uint32_t>{homes.uses[0].slot, homes.uses[1].slot, homes.uses[2].slot}.size() == 3);
}

TEST_CASE("not all slots become large for one large tenant", "[graphs][offload]") {
  Homes homes({400, 400, 4000, 400, 4000, 400});
  const auto slots = assign_slots(homes.graph, homes.table, homes.uses, {.slots = 3});
  int large        = 0;
  for (const sg::Buffer slot : slots) large += homes.graph.spec(slot).size_bytes >= 4000;
  CHECK(large == 1);
}

TEST_CASE("a slot is filled after its last tenant, so slots are the depth of prefetch", "[graphs][offload]") {
  for (const int depth : {1, 2, 3}) {
    Homes homes({400, 400, 400, 400, 400});
    static_cast<void>(assign_slots(homes.graph, homes.table, homes.uses, {.slots = depth}));
    const auto places = fill_places(homes.table, homes.uses, depth);
    for (std::size_t i = 0; i < places.size(); ++i) {
      CAPTURE(depth, i);
      const auto ahead = static_cast<std::size_t>(depth);
      CHECK(places[i] == (i < ahead ? none : homes.uses[i - ahead].last));
    }
  }
}

TEST_CASE("a fill waits until the home has its bytes, and later fills do not overtake it", "[graphs][offload]") {
  Homes homes({400, 400, 400, 400});
  homes.uses[1].after = 7;  // written back by an earlier use
  static_cast<void>(assign_slots(homes.graph, homes.table, homes.uses, {.slots = 4}));
  CHECK(fill_places(homes.table, homes.uses, 4) == std::vector<std::uint32_t>{none, 7, 7, 7});
}

TEST_CASE("a tensor on disk is copied in pieces of the ring, whole blocks at a time", "[graphs][offload]") {
  constexpr std::int64_t piece = 2 * sg::Storage::block_bytes;
  Homes homes({3 * sg::Storage::block_bytes + 400}, sg::Space::disk);
  // The home of a buffer on disk is as large as its blocks.
  sg::Graph graph;
  homes.table.homes[0].home = homes.table.homes[0].buffer = graph.buffer({.name       = "w0",
                                                                          .size_bytes = 4 * sg::Storage::block_bytes,
                                                                          .type       = sg::DType::f32,
                                                                          .space      = sg::Space::disk,
                                                                          .lifetime   = sg::Lifetime::persistent});
  const auto slots                                        = assign_slots(graph, homes.table, homes.uses, {.slots = 1});
  const sg::HomePlan plan{.piece_bytes = piece, .num_pieces = 2};
  sg::offload::Transfers transfers(graph, homes.table, plan, slots);
  transfers.fill(homes.uses[0], homes.uses[0].buffers[0]);
  CHECK(graph.num_nodes() == 4);  // two pieces, each read and then copied
  transfers.back(homes.uses[0], homes.uses[0].buffers[0]);
  REQUIRE(graph.num_nodes() == 8);
  std::int64_t read = 0, up = 0;
  for (std::uint32_t i = 0; i < 4; ++i) {
    const bool is_disk = graph.lane(sg::Node{i})->kind == sg::LaneKind::disk;
    CHECK(is_disk == (i % 2 == 0));
    for (std::size_t a = 0; a < graph.num_accesses(sg::Node{i}); ++a) {
      const auto access = graph.access(sg::Node{i}, a);
      if (!sg::writes(access.mode)) continue;
      (is_disk ? read : up) += access.region.length;
    }
  }
  CHECK(read == 4 * sg::Storage::block_bytes);
  CHECK(up == 3 * sg::Storage::block_bytes + 400);
}

TEST_CASE("transfers of homes in host memory copy only the ranges that a use needs", "[graphs][offload]") {
  Homes homes({400});
  UsedBuffer& buffer = homes.uses[0].buffers[0];
  buffer.fill        = sg::offload::ByteSet(sg::ByteInterval{0, 40});
  buffer.fill.add(sg::ByteInterval{80, 120});
  buffer.back      = {};
  const auto slots = assign_slots(homes.graph, homes.table, homes.uses, {.slots = 1});
  for (const bool async : {true, false}) {
    const sg::HomePlan plan{.async = async};
    const std::uint32_t before = homes.graph.num_nodes();
    sg::offload::Transfers transfers(homes.graph, homes.table, plan, slots);
    transfers.fill(homes.uses[0], buffer);
    transfers.back(homes.uses[0], buffer);
    REQUIRE(homes.graph.num_nodes() == before + 2);
    CHECK(homes.graph.lane(sg::Node{before})->kind == (async ? sg::LaneKind::h2d : sg::LaneKind::compute));
  }
}
