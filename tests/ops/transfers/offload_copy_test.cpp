#include "ops/transfers/offload_copy.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstring>

#include "backends/loopback/world.hpp"
#include "backends/storage/spill_file.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

sg::Buffer bytes(sg::Graph& graph, const char* name, sg::Space space, std::int64_t size) {
  return graph.buffer({.name = name, .size_bytes = size, .space = space, .lifetime = sg::Lifetime::persistent});
}

}  // namespace

TEST_CASE("a range goes down to pinned memory and comes back up, on lanes of their own", "[ops][offload_copy]") {
  constexpr std::int64_t size = 1'000'003;  // several tiles and a rest
  const bool on_compute       = GENERATE(false, true);
  sg::Graph graph;
  const sg::Buffer device = bytes(graph, "device", sg::Space::device, size + 8),
                   host   = bytes(graph, "host", sg::Space::pinned, size),
                   slot   = bytes(graph, "slot", sg::Space::device, size);
  const sg::Node down     = sg::offload_copy(graph, {.name = "down",
                                                     .lane = on_compute ? sg::LaneKind::compute : sg::LaneKind::d2h,
                                                     .to   = host,
                                                     .from = device.range(8, size)});
  const sg::Node up       = sg::offload_copy(
            graph, {.name = "up", .lane = on_compute ? sg::LaneKind::compute : sg::LaneKind::h2d, .to = slot, .from = host});
  CHECK(graph.kind(down) == sg::NodeKind::copy);
  CHECK(graph.op(down) == "d2h");
  CHECK(graph.op(up) == "h2d");
  CHECK(graph.device(up));
  CHECK(graph.lane(up)->kind == (on_compute ? sg::LaneKind::compute : sg::LaneKind::h2d));
  CHECK(graph.cost(up).bytes_moved == 2.0 * size);
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  const sg::Program program(graph, world);
  const auto from = program.memory().span<std::byte>(device), to = program.memory().span<std::byte>(slot);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 131 >> 3);
  executor.run(program);
  CHECK(std::memcmp(to.data(), from.data() + 8, to.size()) == 0);
}

TEST_CASE("tokens order an offload copy and are not copied", "[ops][offload_copy]") {
  sg::Graph graph;
  const sg::Buffer device = bytes(graph, "device", sg::Space::device, 64),
                   host = bytes(graph, "host", sg::Space::pinned, 64), ready = graph.token(sg::Rank{0}, "ready"),
                   copied = graph.token(sg::Rank{0}, "copied");
  const sg::Node before   = graph.add({.name = "before", .writes = ready}, [] {});
  const sg::Node copy =
      sg::offload_copy(graph, {.name = "up", .to = device, .from = host, .after = ready, .done = copied});
  const sg::Node after = graph.add({.name = "after", .reads = copied}, [] {});
  CHECK(sg::reaches(graph, before, copy));
  CHECK(sg::reaches(graph, copy, after));
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const sg::Program program(graph, world);
  program.memory().span<std::byte>(host)[5] = std::byte{7};
  executor.run(program);
  CHECK(program.memory().span<std::byte>(device)[5] == std::byte{7});
}

TEST_CASE("bytes go to disk and come back in another step", "[ops][offload_copy]") {
  constexpr std::int64_t size = 300'001;
  sg::Graph graph;
  const sg::Buffer given = bytes(graph, "given", sg::Space::pinned, size),
                   home  = bytes(graph, "home", sg::Space::disk, 3 * 4096 + size),
                   back  = bytes(graph, "back", sg::Space::pinned, size);
  // The read comes first: in the second step it finds what the first one has written.
  sg::disk_copy(graph, {.name = "fetch", .to = back, .from = home.range(2 * 4096, size)});
  sg::disk_copy(graph, {.name = "keep", .to = home.range(2 * 4096, size), .from = given});
  sg::verify(graph);
  const sg::testing::TempFolder folder;
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2, .waiting_lanes = 1});
  const sg::Program program(graph, world, nullptr, sg::spill_files(folder.path().string()));
  const auto from = program.memory().span<std::byte>(given), to = program.memory().span<std::byte>(back);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 137 >> 4);
  executor.run(program);
  CHECK(to[77] == std::byte{0});
  executor.run(program);
  CHECK(std::memcmp(to.data(), from.data(), to.size()) == 0);
}

TEST_CASE("offload copies of wrong spaces, sizes, ranges and lanes are refused", "[ops][offload_copy][refuses]") {
  sg::Graph graph;
  const sg::Buffer device = bytes(graph, "d", sg::Space::device, 64), host = bytes(graph, "h", sg::Space::pinned, 64),
                   disk = bytes(graph, "f", sg::Space::disk, 8192);
  const auto says       = [](const char* text) { return MessageMatches(ContainsSubstring(text)); };
  CHECK_THROWS_MATCHES(sg::offload_copy(graph, {.name = "c", .to = device, .from = disk}), sg::Error,
                       says("offload_copy 'c': from disk to device memory (from pinned to device, or back)"));
  CHECK_THROWS_MATCHES(sg::offload_copy(graph, {.name = "c", .to = device.range(0, 8), .from = device.range(8, 8)}),
                       sg::Error, says("from device to device memory"));
  CHECK_THROWS_MATCHES(sg::offload_copy(graph, {.name = "c", .to = device, .from = host.range(0, 32)}), sg::Error,
                       says("32 bytes into 64 (equal numbers)"));
  CHECK_THROWS_MATCHES(sg::offload_copy(graph, {.name = "c", .to = host, .from = device}), sg::Error,
                       says("lane h2d (d2h or compute)"));
  CHECK_THROWS_MATCHES(
      sg::offload_copy(graph, {.name = "c", .to = device.range(0, 16), .from = host.strided(0, 8, 16, 2)}), sg::Error,
      says("several ranges (one range)"));

  CHECK_THROWS_MATCHES(sg::disk_copy(graph, {.name = "c", .to = device, .from = disk}), sg::Error,
                       says("disk_copy 'c': from disk to device memory (from disk to pinned, or back)"));
  CHECK_THROWS_MATCHES(sg::disk_copy(graph, {.name = "c", .to = host, .from = disk.range(64, 64)}), sg::Error,
                       says("offset 64 in buffer 'f' (a multiple of 4096)"));
  CHECK_THROWS_MATCHES(sg::disk_copy(graph, {.name = "c", .to = disk.range(0, 32), .from = host}), sg::Error,
                       says("64 bytes into 32 (equal numbers)"));
  CHECK_THROWS_MATCHES(
      sg::disk_copy(graph, {.name = "c", .lane = sg::LaneKind::h2d, .to = host, .from = disk.range(0, 64)}), sg::Error,
      says("lane h2d (disk)"));
  const sg::Node read  = sg::disk_copy(graph, {.name = "read", .to = host, .from = disk.range(4096, 64)});
  const sg::Node write = sg::disk_copy(graph, {.name = "write", .to = disk.range(0, 64), .from = host});
  CHECK(graph.op(read) == "disk_read");
  CHECK(graph.op(write) == "disk_write");
  CHECK(graph.kind(read) == sg::NodeKind::host);
  CHECK(graph.lane(read)->kind == sg::LaneKind::disk);
  CHECK(graph.cost(write).bytes_moved == 128);
}
