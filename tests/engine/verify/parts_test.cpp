// The verifier on parts: sizes of shards, peers of permutations, and in-place operations.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/graph/shards.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/worlds/still_world.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using enum sg::PartOp;

namespace {

// Three ranks, each with a persistent buffer x of 48 bytes, and a group of all of them.
struct Three {
  Three() : graph(3) {
    for (int rank = 0; rank < 3; ++rank)
      x.push_back(graph.buffer({.name       = "x",
                                .rank       = sg::Rank{rank},
                                .size_bytes = 48,
                                .type       = sg::DType::u8,
                                .lifetime   = sg::Lifetime::persistent}));
    group = graph.group({.name = "all", .ranks = {sg::Rank{0}, sg::Rank{1}, sg::Rank{2}}});
  }
  void add(int rank, sg::PartSpec part, const sg::AccessList& reads, const sg::AccessList& writes,
           const sg::AccessList& accumulates = {}) {
    part.group = group;
    graph.add({.name        = "p",
               .reads       = reads,
               .writes      = writes,
               .accumulates = accumulates,
               .part        = part,
               .rank        = sg::Rank{rank}});
  }
  // The flaws of the graph, and of each of its slices, as one text.
  [[nodiscard]] std::string flaws() const { return flaws_of(graph); }
  [[nodiscard]] std::string flaws_of_slice(int rank) const { return flaws_of(sg::slice(graph, sg::Rank{rank})); }
  static std::string flaws_of(const sg::Graph& graph) {
    std::string text;
    for (const sg::Finding& finding : sg::find_flaws(graph))
      text += sg::str(sg::to_string(finding.flaw), ": ", finding.message, "\n");
    return text;
  }

  sg::Graph graph;
  sg::Group group;
  std::vector<sg::Buffer> x;
};

// One rank's part alone, with accesses of its buffer.
std::string flaws_alone(sg::PartSpec part, int rank, const std::function<sg::AccessList(sg::Buffer)>& reads,
                        const std::function<sg::AccessList(sg::Buffer)>& writes) {
  Three three;
  const sg::Buffer x = three.x[static_cast<std::size_t>(rank)];
  three.add(rank, part, reads ? reads(x) : sg::AccessList(), writes ? writes(x) : sg::AccessList());
  return three.flaws_of_slice(rank);
}

auto range(std::int64_t offset, std::int64_t length) {
  return [=](sg::Buffer x) -> sg::AccessList { return x.range(offset, length); };
}
auto ranges(std::initializer_list<std::pair<std::int64_t, std::int64_t>> list) {
  return [all = std::vector(list)](sg::Buffer x) {
    sg::AccessList accesses;
    for (const auto& [offset, length] : all) accesses.push_back(x.range(offset, length));
    return accesses;
  };
}

}  // namespace

TEST_CASE("uneven shards fit if each member's access has the right size", "[engine][verify][parts]") {
  for (const std::int64_t of_last : {12, 8}) {
    Three three;
    for (int rank = 0; rank < 3; ++rank) {
      const sg::Buffer x = three.x[static_cast<std::size_t>(rank)];
      // Ranks 0, 1 and 2 have 4, 0 and 12 bytes.
      const std::int64_t own = rank == 0 ? 4 : rank == 1 ? 0 : of_last;
      three.add(rank, {.op = all_gather}, x.range(0, own), {x.range(20, 4), x.range(24, 0), x.range(24, of_last)});
    }
    CHECK(three.flaws() == "");
    if (of_last == 8) continue;
    Three other;
    for (int rank = 0; rank < 3; ++rank) {
      const sg::Buffer x     = other.x[static_cast<std::size_t>(rank)];
      const std::int64_t own = rank == 0 ? 4 : rank == 1 ? 0 : 12;
      const std::int64_t of1 = rank == 0 ? 4 : 0;  // rank 0 expects bytes from rank 1
      other.add(rank, {.op = all_gather}, x.range(0, own), {x.range(20, 4), x.range(24, of1), x.range(28, 12)});
    }
    CHECK_THAT(other.flaws(), ContainsSubstring("it has 4 bytes for the shard of rank 1, which sends 0"));
  }
}

TEST_CASE("a part with invalid sizes is also found in a slice", "[engine][verify][parts]") {
  const auto mismatch = [](const std::string& text, const char* why) {
    CHECK_THAT(text, ContainsSubstring("mismatched parts") && ContainsSubstring(why));
  };
  mismatch(flaws_alone({.op = all_reduce}, 0, range(0, 6), range(8, 6)), "not whole f32");
  mismatch(flaws_alone({.op = all_reduce}, 0, range(0, 8), range(8, 4)),
           "it sends 8 bytes, but receives 4 (equal sizes)");
  mismatch(flaws_alone({.op = all_gather}, 0, range(0, 4), range(16, 16)), "not 3 shards of whole f32");
  mismatch(flaws_alone({.op = all_gather}, 1, range(0, 4), range(16, 24)),
           "its shard of the bytes that it receives has 8");
  mismatch(flaws_alone({.op = reduce_scatter}, 1, range(0, 24), range(40, 4)),
           "its shard of the bytes that it sends has 8");
  mismatch(flaws_alone({.op = reduce, .root = sg::Rank{1}}, 0, range(0, 4), range(8, 4)),
           "a rank that is not the root");
  mismatch(flaws_alone({.op = gather, .root = sg::Rank{1}}, 0, range(0, 4), range(8, 12)),
           "a rank that is not the root");
  mismatch(flaws_alone({.op = scatter, .root = sg::Rank{1}}, 0, range(0, 12), range(40, 4)),
           "a rank that is not the root");
  mismatch(flaws_alone({.op = permute, .source = sg::Rank{1}}, 0, range(0, 4), range(8, 4)), "a rank without a peer");
  mismatch(flaws_alone({.op = permute, .peer = sg::Rank{1}}, 0, range(0, 4), range(8, 4)), "a rank without a source");
  mismatch(flaws_alone({.op = all_to_all}, 0, ranges({{0, 4}, {4, 4}, {8, 4}}), ranges({{20, 8}, {28, 0}, {28, 4}})),
           "sends itself 4 bytes and receives 8");
}

TEST_CASE("all_to_all matches the sizes of every pair of members", "[engine][verify][parts]") {
  for (const bool fits : {true, false}) {
    Three three;
    for (int a = 0; a < 3; ++a) {
      // a sends 4 * (a + b) bytes to b, as many as b sends to a.
      const sg::Buffer x = three.x[static_cast<std::size_t>(a)];
      sg::AccessList slices;
      std::int64_t at = 0;
      for (int b = 0; b < 3; ++b) {
        const std::int64_t size = 4 * (a + b) + (!fits && a == 0 && b == 2 ? 4 : 0);
        slices.push_back(x.range(at, size));
        at += size;
      }
      three.add(a, {.op = all_to_all}, {}, {}, slices);
    }
    if (fits) CHECK(three.flaws() == "");
    if (!fits) CHECK_THAT(three.flaws(), ContainsSubstring("it sends 12 bytes to rank 2, which receives 8 from it"));
  }
}

TEST_CASE("the members of a permutation must agree on senders and receivers", "[engine][verify][parts]") {
  const auto ring = [](sg::Rank last_peer, sg::Rank first_source, std::int64_t received = 8) {
    Three three;
    for (int rank = 0; rank < 3; ++rank) {
      const sg::Buffer x = three.x[static_cast<std::size_t>(rank)];
      const sg::Rank peer{(rank + 1) % 3}, source{(rank + 2) % 3};
      three.add(rank,
                {.op = permute, .peer = rank == 2 ? last_peer : peer, .source = rank == 0 ? first_source : source},
                rank == 2 && last_peer == sg::Rank{-1} ? sg::AccessList() : sg::AccessList(x.range(0, 8)),
                rank == 0 && first_source == sg::Rank{-1} ? sg::AccessList() : sg::AccessList(x.range(16, received)));
    }
    return three.flaws();
  };
  constexpr sg::Rank nobody{-1};
  CHECK(ring(sg::Rank{0}, sg::Rank{2}) == "");
  CHECK(ring(nobody, nobody) == "");
  CHECK_THAT(ring(sg::Rank{0}, nobody), ContainsSubstring("sends to rank 0, which expects a message from rank -1"));
  CHECK_THAT(ring(nobody, sg::Rank{2}), ContainsSubstring("expects a message from rank 2, which sends to rank -1"));
  CHECK_THAT(ring(sg::Rank{1}, sg::Rank{2}), ContainsSubstring("mismatched parts"));
  CHECK_THAT(ring(sg::Rank{0}, sg::Rank{2}, 4), ContainsSubstring("sizes do not fit"));
}

TEST_CASE("a part may be in place only at the offsets its operation allows", "[engine][verify][overlap]") {
  const auto good = [](const std::string& text) { CHECK(text == ""); };
  const auto bad  = [](const std::string& text) {
    CHECK_THAT(text, ContainsSubstring("input overlaps output: rank ") && ContainsSubstring("of buffer 'x'"));
  };
  const sg::PartSpec to_root{.op = gather, .root = sg::Rank{1}}, from_root{.op = scatter, .root = sg::Rank{1}};
  good(flaws_alone({.op = all_reduce}, 0, range(0, 12), range(0, 12)));
  bad(flaws_alone({.op = all_reduce}, 0, range(0, 12), range(4, 12)));
  good(flaws_alone({.op = all_reduce}, 0, range(0, 12), ranges({{0, 4}, {4, 8}})));
  bad(flaws_alone({.op = all_reduce}, 0, range(0, 12), ranges({{4, 8}, {0, 4}})));
  good(flaws_alone({.op = reduce, .root = sg::Rank{0}}, 0, range(0, 12), range(0, 12)));
  good(flaws_alone({.op = broadcast, .root = sg::Rank{0}}, 0, range(0, 12), range(0, 12)));
  good(flaws_alone({.op = all_gather}, 1, range(4, 4), range(0, 12)));
  bad(flaws_alone({.op = all_gather}, 1, range(0, 4), range(0, 12)));
  good(flaws_alone({.op = all_gather}, 1, range(0, 4), ranges({{20, 4}, {0, 4}, {24, 4}})));
  good(flaws_alone({.op = reduce_scatter}, 2, range(0, 12), range(8, 4)));
  bad(flaws_alone({.op = reduce_scatter}, 2, range(0, 12), range(4, 4)));
  good(flaws_alone(to_root, 1, range(4, 4), range(0, 12)));
  bad(flaws_alone(to_root, 1, range(8, 4), range(0, 12)));
  good(flaws_alone(from_root, 1, range(0, 12), range(4, 4)));
  bad(flaws_alone(from_root, 1, range(0, 12), range(0, 4)));
  good(flaws_alone({.op = all_to_all}, 1, range(0, 12), range(0, 12)));
  bad(flaws_alone({.op = all_to_all}, 1, range(0, 12), range(4, 12)));
  const auto neighbours = sg::PartSpec{.op = permute, .peer = sg::Rank{1}, .source = sg::Rank{1}};
  good(flaws_alone(neighbours, 0, range(0, 8), range(8, 8)));
  bad(flaws_alone(neighbours, 0, range(0, 8), range(0, 8)));
  bad(flaws_alone({.op = recv, .peer = sg::Rank{1}}, 0, range(0, 8), range(4, 8)));
  good(flaws_alone({.op = barrier}, 0, range(0, 8), range(4, 8)));
}

TEST_CASE("slices exchanged in place must have the same layout on both sides", "[engine][verify][overlap]") {
  const auto bad = ContainsSubstring("input overlaps output");
  // The same bytes, but cut differently: the slice for rank 2 would be overwritten before it is sent.
  CHECK_THAT(flaws_alone({.op = all_to_all}, 0, ranges({{0, 4}, {4, 4}, {8, 8}}), ranges({{0, 4}, {4, 8}, {12, 4}})),
             bad);
  // The same sizes at different offsets: the slice to rank 2 lies where the slice from rank 1 goes.
  CHECK_THAT(flaws_alone({.op = all_to_all}, 0, ranges({{0, 4}, {20, 4}, {8, 4}}), ranges({{0, 4}, {4, 8}, {12, 4}})),
             bad);
}

TEST_CASE("rows are compared byte by byte, and no byte is written twice", "[engine][verify][overlap]") {
  const auto columns = [](std::int64_t offset) {
    return [=](sg::Buffer x) -> sg::AccessList { return x.strided(offset, 4, 12, 3); };
  };
  CHECK(flaws_alone({.op = all_reduce}, 0, columns(0), columns(0)) == "");
  CHECK(flaws_alone({.op = all_reduce}, 0, columns(0), columns(4)) == "");
  CHECK_THAT(flaws_alone({.op = all_reduce}, 0, columns(0), columns(2)), ContainsSubstring("bytes [2, 4)"));
  CHECK(flaws_alone({.op = all_reduce}, 0, columns(0), ranges({{0, 4}, {12, 4}, {24, 4}})) == "");
  CHECK_THAT(flaws_alone({.op = all_reduce}, 0, columns(0), ranges({{12, 4}, {0, 4}, {24, 4}})),
             ContainsSubstring("input overlaps output"));
  CHECK_THAT(flaws_alone({.op = recv, .peer = sg::Rank{1}}, 0, {}, ranges({{0, 8}, {4, 8}})),
             ContainsSubstring("writes bytes [4, 8) of buffer 'x' twice"));
}

TEST_CASE("a program refuses parts whose sizes do not fit", "[engine][lowering][refuses]") {
  Three three;
  for (int rank = 0; rank < 3; ++rank)
    three.add(rank, {.op = all_reduce}, {}, {}, three.x[static_cast<std::size_t>(rank)].range(0, rank == 2 ? 8 : 4));
  sg::testing::StillWorld world(3);
  CHECK_THROWS_WITH(sg::Program(three.graph, world), ContainsSubstring("sizes do not fit"));
}

TEST_CASE("members that a slice holds must fit together, though others are in other processes",
          "[engine][verify][parts]") {
  const sg::RankSet held(std::vector{sg::Rank{0}, sg::Rank{2}});
  // A world of ranks 0 and 2 of three.
  class PartialWorld final : public sg::World {
   public:
    explicit PartialWorld(sg::RankSet ranks) : ranks_(std::move(ranks)) {}
    [[nodiscard]] int num_ranks() const override { return 3; }
    [[nodiscard]] sg::RankSet local_ranks() const override { return ranks_; }
    [[nodiscard]] bool waits(sg::LaneKind) const override { return false; }
    [[nodiscard]] sg::IssueOrder issue_order() const override { return sg::IssueOrder::any; }
    void communicate(const sg::Context&, const sg::Exchange&) override {}
    void abort(std::string_view) noexcept override {}

   private:
    sg::RankSet ranks_;
  };
  PartialWorld world(held);
  using Accesses   = std::function<sg::AccessList(int rank, sg::Buffer x)>;
  const auto check = [&](const std::function<sg::PartSpec(int rank)>& part, const Accesses& reads,
                         const Accesses& writes, const char* why) {
    Three three;
    for (int rank = 0; rank < 3; ++rank) {
      const sg::Buffer x = three.x[static_cast<std::size_t>(rank)];
      three.add(rank, part(rank), reads(rank, x), writes(rank, x));
    }
    const sg::Graph slice   = sg::slice(three.graph, held);
    const std::string flaws = Three::flaws_of(slice);
    if (why == nullptr) {
      CHECK(flaws == "");
      CHECK_NOTHROW(sg::Program(slice, world));
    } else {
      CHECK_THAT(flaws, ContainsSubstring(why));
      CHECK_THROWS_WITH(sg::Program(slice, world), ContainsSubstring(why));
    }
  };
  const auto all = [](sg::PartOp op) { return [op](int) { return sg::PartSpec{.op = op}; }; };
  for (const bool fits : {true, false}) {
    CAPTURE(fits);
    const std::int64_t more = fits ? 0 : 4;
    const char* const why   = fits ? nullptr : "sizes do not fit";
    check(
        all(all_reduce), [&](int rank, sg::Buffer x) { return x.range(0, rank == 2 ? 8 + more : 8); },
        [&](int rank, sg::Buffer x) { return x.range(24, rank == 2 ? 8 + more : 8); }, why);
    // Shards of 4, 8 and 12 bytes. Rank 2 expects more from rank 0, which is here.
    check(
        all(all_gather), [&](int rank, sg::Buffer x) { return x.range(0, 4 * (rank + 1)); },
        [&](int rank, sg::Buffer x) -> sg::AccessList {
          const std::int64_t first = rank == 2 ? 4 + more : 4;
          return {x.range(16, first), x.range(16 + first, 8), x.range(24 + first, 12)};
        },
        why);
    // Rank 2 expects more from rank 1, which is not here.
    check(
        all(all_gather), [&](int rank, sg::Buffer x) { return x.range(0, 4 * (rank + 1)); },
        [&](int rank, sg::Buffer x) -> sg::AccessList {
          const std::int64_t second = rank == 2 ? 8 + more : 8;
          return {x.range(16, 4), x.range(20, second), x.range(20 + second, 12)};
        },
        why);
    // Rank 0 sends more to rank 2 than rank 2 receives.
    check(
        all(all_to_all),
        [&](int rank, sg::Buffer x) -> sg::AccessList {
          return {x.range(0, 4), x.range(4, 4), x.range(8, rank == 0 ? 4 + more : 4)};
        },
        [&](int, sg::Buffer x) -> sg::AccessList {
          return {x.range(24, 4), x.range(28, 4), x.range(32, 4)};
        },
        why);
    // A ring: rank 2 sends to rank 0.
    check(
        [](int rank) {
          return sg::PartSpec{.op = permute, .peer = sg::Rank{(rank + 1) % 3}, .source = sg::Rank{(rank + 2) % 3}};
        },
        [&](int rank, sg::Buffer x) { return x.range(0, rank == 2 ? 8 + more : 8); },
        [&](int, sg::Buffer x) { return x.range(24, 8); }, why);
  }
}

TEST_CASE("a graph refuses invalid roots, peers and sources", "[engine][graph][refuses]") {
  const auto refused = [](sg::PartSpec part, const char* why) {
    Three three;
    part.group = three.group;
    try {
      three.graph.add({.name = "p", .part = part, .rank = sg::Rank{0}});
      FAIL_CHECK("accepted: " << why);
    } catch (const sg::Error& error) {
      CHECK_THAT(error.what(), ContainsSubstring(why));
    }
  };
  for (const sg::PartOp op : {reduce, broadcast, scatter, gather}) refused({.op = op}, "root -1 is not in group 'all'");
  refused({.op = permute, .peer = sg::Rank{7}}, "peer 7 is not in group 'all'");
  refused({.op = permute, .source = sg::Rank{7}}, "source 7 is not in group 'all'");
  refused({.op = permute, .peer = sg::Rank{0}}, "rank 0 cannot be its own peer");
  refused({.op = permute, .source = sg::Rank{0}}, "rank 0 cannot be its own source");
  Three three;
  three.add(0, {.op = permute, .peer = sg::Rank{1}, .source = sg::Rank{2}}, {}, {});
  CHECK(three.graph.spec(sg::Node{0}).part->source == sg::Rank{2});
  CHECK(sg::slice(three.graph, sg::Rank{0}).part(sg::Node{0}).source == sg::Rank{2});
  sg::Graph other = Three().graph;
  other.add({.name = "p",
             .part = sg::PartSpec{.group = three.group, .op = permute, .peer = sg::Rank{1}},
             .rank = sg::Rank{0}});
  CHECK(other != three.graph);
}

TEST_CASE("shards are cut by access, or evenly", "[engine][shards]") {
  const std::vector<std::int64_t> one{24}, three{4, 0, 8}, uneven{4, 2, 6};
  CHECK(*sg::cut_shards(one, 3, sg::DType::f32) == sg::ShardSizes(3, 8));
  CHECK(*sg::cut_shards(three, 3, sg::DType::f32) == sg::ShardSizes({4, 0, 8}));
  CHECK(sg::cut_shards(three, 3, sg::DType::f32)->begin(2) == 4);
  CHECK_FALSE(sg::cut_shards(uneven, 3, sg::DType::f32));
  CHECK(sg::cut_shards(uneven, 3, sg::DType::u8));
  CHECK(*sg::cut_shards(uneven, 1, sg::DType::f32) == sg::ShardSizes(1, 12));
  CHECK_FALSE(sg::cut_shards(one, 4, sg::DType::f64));
  CHECK(*sg::cut_shards({}, 3, sg::DType::f32) == sg::ShardSizes(3, 0));
}

TEST_CASE("the bytes of many huge parts are added up without overflow", "[engine][verify][parts]") {
  constexpr int ranks = 200;
  sg::Graph graph(ranks);
  std::vector<sg::Rank> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(sg::Rank{rank});
  const sg::Group group = graph.group({.name = "all", .ranks = all});
  for (const sg::Rank rank : all) {
    const sg::Buffer x = graph.buffer({.name       = "x",
                                       .rank       = rank,
                                       .size_bytes = sg::Graph::most_bytes,
                                       .type       = sg::DType::u8,
                                       .lifetime   = sg::Lifetime::persistent});
    // The last rank sends one byte less.
    const std::int64_t size = sg::Graph::most_bytes - (rank == all.back() ? 1 : 0);
    graph.add({.name        = "sum",
               .accumulates = x.range(0, size),
               .part        = sg::PartSpec{.group = group, .op = all_reduce, .type = sg::DType::u8}});
  }
  CHECK_THAT(Three::flaws_of(graph),
             ContainsSubstring("all 200 members together send 9223372036854775807 and receive 9223372036854775807"));
}

TEST_CASE("a part whose accesses add up to more bytes than a rank can have is refused", "[engine][parts][refuses]") {
  sg::Graph graph;
  const sg::Group group = graph.group({.name = "one", .ranks = {sg::Rank{0}}});
  const sg::Buffer x    = graph.buffer({.name = "x", .size_bytes = sg::Graph::most_bytes, .type = sg::DType::u8});
  const auto add        = [&](const sg::AccessList& reads) {
    graph.add({.name = "sum", .reads = reads, .part = sg::PartSpec{.group = group, .type = sg::DType::u8}});
  };
  CHECK_NOTHROW(add({x}));
  CHECK_THROWS_WITH(add({x, x}), ContainsSubstring("part 'sum' sends or receives more than "));
  CHECK_THROWS_WITH(add({x, x.range(5, 1)}), ContainsSubstring("part 'sum' sends or receives more than "));
  CHECK(graph.num_nodes() == 1);
}
