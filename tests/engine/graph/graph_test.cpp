#include "engine/graph/graph.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <limits>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/plan/memory_plan.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

std::vector<std::uint32_t> preds(const sg::Graph& graph, sg::Node node) {
  const auto before = graph.edges().before(node);
  return {before.begin(), before.end()};
}

std::vector<std::uint32_t> loop_preds(const sg::Graph& graph, sg::Node node) {
  const auto before = graph.edges().before_loop(node);
  return {before.begin(), before.end()};
}

constexpr sg::Rank r0{0};

}  // namespace

TEST_CASE("reads follow the last write and writes follow the reads since", "[engine][graph]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 16});
  const sg::Node w1  = graph.add({.name = "w1", .writes = {x}});
  const sg::Node r1  = graph.add({.name = "r1", .reads = {x}});
  const sg::Node r2  = graph.add({.name = "r2", .reads = {x}});
  const sg::Node w2  = graph.add({.name = "w2", .writes = {x}});
  const sg::Node w3  = graph.add({.name = "w3", .writes = {x}});
  CHECK(preds(graph, w1).empty());
  CHECK(preds(graph, r1) == std::vector{w1.id});
  CHECK(preds(graph, r2) == std::vector{w1.id});
  CHECK(preds(graph, w2) == std::vector{r1.id, r2.id});
  CHECK(preds(graph, w3) == std::vector{w2.id});
}

TEST_CASE("accesses conflict byte by byte", "[engine][graph]") {
  sg::Graph graph;
  const sg::Buffer x  = graph.buffer({.name = "x", .size_bytes = 64});
  const sg::Node low  = graph.add({.name = "low", .writes = {x.range(0, 32)}});
  const sg::Node high = graph.add({.name = "high", .writes = {x.range(32, 32)}});
  const sg::Node mid  = graph.add({.name = "mid", .reads = {x.range(31, 2)}});
  const sg::Node even = graph.add({.name = "even", .writes = {x.strided(0, 4, 8, 8)}});  // bytes 0-3 of every 8
  const sg::Node odd  = graph.add({.name = "odd", .writes = {x.strided(4, 4, 8, 8)}});   // bytes 4-7 of every 8
  const sg::Node two  = graph.add({.name = "two", .reads = {x.strided(2, 2, 16, 4)}});   // bytes 2-3 of every 16
  const sg::Node byte = graph.add({.name = "byte", .reads = {x.range(4, 1)}});
  CHECK(preds(graph, high).empty());
  CHECK(preds(graph, mid) == std::vector{low.id, high.id});
  CHECK(preds(graph, even) == std::vector{low.id, high.id, mid.id});
  CHECK(preds(graph, odd) == std::vector{low.id, high.id, mid.id});
  CHECK(preds(graph, two) == std::vector{even.id});
  CHECK(preds(graph, byte) == std::vector{odd.id});
}

TEST_CASE("accumulates form a chain in the order they were added", "[engine][graph]") {
  sg::Graph graph;
  const sg::Buffer sum = graph.buffer({.name = "sum", .size_bytes = 4, .lifetime = sg::Lifetime::persistent});
  const sg::Node a     = graph.add({.name = "a", .accumulates = {sum}});
  const sg::Node b     = graph.add({.name = "b", .accumulates = {sum}});
  const sg::Node c     = graph.add({.name = "c", .accumulates = {sum}});
  CHECK(preds(graph, b) == std::vector{a.id});
  CHECK(preds(graph, c) == std::vector{b.id});
  CHECK(loop_preds(graph, a) == std::vector{c.id});
}

TEST_CASE("a lane is a chain and edges it implies are dropped", "[engine][graph]") {
  sg::Graph graph;
  const auto compute = graph.lane(r0, sg::LaneKind::compute), gather = graph.lane(r0, sg::LaneKind::gather);
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 4});
  const sg::Node a   = graph.add({.name = "a", .lane = compute, .writes = {x}});
  const sg::Node b   = graph.add({.name = "b", .lane = compute});
  const sg::Node c   = graph.add({.name = "c", .lane = compute, .reads = {x}});
  const sg::Node d   = graph.add({.name = "d", .lane = gather, .reads = {x}});
  const sg::Node e   = graph.add({.name = "e", .lane = compute, .writes = {x}});
  CHECK(preds(graph, b) == std::vector{a.id});
  CHECK(preds(graph, c) == std::vector{b.id});  // a -> c is implied by the lane
  CHECK(preds(graph, d) == std::vector{a.id});
  CHECK(preds(graph, e) == std::vector{c.id, d.id});
  CHECK(sg::reaches(graph, a, e));
  CHECK_FALSE(sg::reaches(graph, b, d));
  CHECK_FALSE(sg::reaches(graph, e, a));
}

TEST_CASE("each rank is ordered independently", "[engine][graph]") {
  sg::Graph graph(2);
  const sg::Group pair = graph.group({.name = "pair", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  const sg::Buffer x   = graph.buffer({.name = "x", .rank = sg::Rank{0}, .size_bytes = 4});
  const sg::Buffer y   = graph.buffer({.name = "y", .rank = sg::Rank{1}, .size_bytes = 4});
  const sg::Node w     = graph.add({.name = "w", .writes = {x}});
  const sg::Node s     = graph.add(
          {.name = "m", .reads = {x}, .part = sg::PartSpec{.group = pair, .op = sg::PartOp::send, .peer = sg::Rank{1}}});
  const sg::Node r = graph.add(
      {.name = "m", .writes = {y}, .part = sg::PartSpec{.group = pair, .op = sg::PartOp::recv, .peer = sg::Rank{0}}});
  CHECK(preds(graph, s) == std::vector{w.id});
  CHECK(preds(graph, r).empty());
  CHECK_FALSE(sg::reaches(graph, w, r));
}

TEST_CASE("the graph followed by itself keeps the order of its accesses", "[engine][graph][loop]") {
  sg::Graph graph;
  const sg::Buffer weights = graph.buffer({.name = "weights", .size_bytes = 4, .lifetime = sg::Lifetime::persistent});
  const sg::Buffer grad    = graph.buffer({.name = "grad", .size_bytes = 4});
  const sg::Node forward   = graph.add({.name = "forward", .reads = {weights}, .writes = {grad}});
  const sg::Node look      = graph.add({.name = "look", .reads = {grad}});
  const sg::Node update    = graph.add({.name = "update", .reads = {grad}, .accumulates = {weights}});
  CHECK(loop_preds(graph, forward) ==
        std::vector{look.id, update.id});  // weights after the update, gradients after their readers
  CHECK(loop_preds(graph, look).empty());
  CHECK(loop_preds(graph, update).empty());
}

TEST_CASE("loop edges that lanes imply are dropped", "[engine][graph][loop]") {
  sg::Graph graph;
  const auto lane    = graph.lane(r0, sg::LaneKind::compute);
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 4, .lifetime = sg::Lifetime::persistent});
  const sg::Node a   = graph.add({.name = "a", .lane = lane, .reads = {x}});
  const sg::Node b   = graph.add({.name = "b", .lane = lane, .writes = {x}});
  const sg::Node c   = graph.add({.name = "c", .lane = lane});
  CHECK(loop_preds(graph, a) == std::vector{c.id});  // b -> a of the next run is implied by the lane
  CHECK(loop_preds(graph, b).empty());
  CHECK(loop_preds(graph, c).empty());
}

TEST_CASE("empty accesses order nothing and keep their place", "[engine][graph]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8}), empty = graph.buffer({.name = "empty"});
  const sg::Node a = graph.add({.name = "a", .writes = {x.range(4, 0), empty}});
  const sg::Node b = graph.add({.name = "b", .reads = {empty, x.strided(0, 4, 8, 0)}});
  CHECK(preds(graph, b).empty());
  CHECK(graph.num_accesses(a) == 2);
  CHECK(graph.num_accesses(b) == 2);
}

TEST_CASE("a copy is independent of later changes", "[engine][graph]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 4});
  graph.add({.name = "a", .writes = {x}});
  const sg::Graph before = graph;
  graph.add({.name = "b", .reads = {x}});
  CHECK(before.num_nodes() == 1);
  CHECK(graph.num_nodes() == 2);
  CHECK_FALSE(before == graph);
  CHECK(graph.edges().preds.size() == 1);
  CHECK(before.edges().preds.empty());
}

TEST_CASE("a range of a range counts from its beginning", "[engine][graph]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 16});
  CHECK((x.range(4, 8).range(2, 6).region == sg::Region{.offset = 6, .length = 6}));
  CHECK((sg::Access(x).range(2, 6).region == sg::Region{.offset = 2, .length = 6}));
  CHECK((x.strided(4, 8, 0, 1).range(8, 0).region == sg::Region{.offset = 12, .length = 0}));
}

TEST_CASE("buffers that no memory can hold are refused, one by one and together", "[engine][graph][refuses]") {
  sg::Graph graph(2);
  const auto add = [&](std::int64_t size, int rank = 0) {
    return graph.buffer({.name = "huge", .rank = sg::Rank{rank}, .size_bytes = size});
  };
  constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t size : {largest, largest - 1, largest - 62, largest - 63, sg::Graph::most_bytes + 1}) {
    CAPTURE(size);
    CHECK_THROWS_MATCHES(add(size), sg::Error, MessageMatches(ContainsSubstring("rank 0 has buffers of 0 (at most ")));
  }
  const sg::Buffer most = add(sg::Graph::most_bytes - 1);
  (void)add(1);
  CHECK_THROWS_MATCHES(add(1), sg::Error,
                       MessageMatches(ContainsSubstring("'huge' of 1 bytes: rank 0 has buffers of")));
  CHECK_NOTHROW(add(sg::Graph::most_bytes, 1));
  graph.add({.name = "touch", .writes = {most}});
  CHECK(sg::plan_memory(graph).arena(sg::Rank{0}).size_bytes == sg::Graph::most_bytes);
}

TEST_CASE("invalid declarations are refused with what would be valid", "[engine][graph][refuses]") {
  sg::Graph graph(2);
  const sg::Buffer x   = graph.buffer({.name = "x", .size_bytes = 16});
  const sg::Buffer y   = graph.buffer({.name = "y", .rank = sg::Rank{1}, .size_bytes = 16});
  const sg::Group pair = graph.group({.name = "pair", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  const auto refuses   = [](auto&& make, const std::string& why) {
    CAPTURE(why);
    CHECK_THROWS_MATCHES(make(), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refuses([&] { graph.add({.name = "n", .reads = {x.range(8, 16)}}); }, "the buffer has 16 bytes");
  refuses([&] { graph.add({.name = "n", .reads = {x.range(0, -1)}}); }, "must not be negative");
  refuses([&] { graph.add({.name = "n", .reads = {x.strided(0, 8, 4, 2)}}); }, "stride must be at least the length");
  refuses([&] { graph.add({.name = "n", .reads = {x.strided(0, 4, 8, 1'000'000'000'000)}}); },
          "the buffer has 16 bytes");
  refuses([&] { graph.add({.name = "n", .reads = {x, y}}); }, "buffer 'y' is on rank 1");
  refuses([&] { graph.add({.name = "n"}); }, "(set its rank)");
  refuses([&] { graph.add({.name = "n", .reads = {sg::Buffer{}}}); }, "this buffer was never made");
  refuses([&] { (void)graph.spec(sg::Buffer{9}); }, "buffer #9 is not in this graph (it has 2 buffers)");
  refuses([&] { (void)graph.spec(sg::Group{}); }, "this group was never made");
  refuses([&] { (void)graph.describe(sg::Node{3}); }, "node #3 is not in this graph");
  refuses([&] { graph.add({.name = "n", .rank = sg::Rank{7}}); }, "rank 7 is not in the world (0 to 1)");
  refuses([&] { (void)graph.buffer({.name = "odd", .size_bytes = 6, .type = sg::DType::f32}); }, "whole number of f32");
  refuses([&] { (void)graph.buffer({.name = "minus", .size_bytes = -4}); }, "negative");
  refuses([&] { (void)x.range(0, 8).range(4, 8); }, "8 bytes from 4 of [0, 8), which has 8");
  refuses([&] { (void)sg::Access(x.range(4, 8)).range(-4, 4); }, "4 bytes from -4 of [4, 12)");
  refuses([&] { (void)x.strided(0, 2, 4, 3).range(2, 2); }, "of 3 x [0, 2) every 4, which is strided");
  refuses([&] { (void)graph.group({.name = "none"}); }, "has no ranks");
  refuses([&] { (void)graph.group({.name = "twice", .ranks = {sg::Rank{0}, sg::Rank{0}}}); }, "member twice");
  refuses([&] { graph.add({.name = "p", .reads = {x}, .part = sg::PartSpec{}}); }, "this group was never made");
  refuses(
      [&] {
        graph.add({.name = "p", .reads = {x}, .part = sg::PartSpec{.group = pair, .op = sg::PartOp::send, .peer = r0}});
      },
      "to itself");
  refuses(
      [&] { graph.add({.name = "p", .reads = {x}, .part = sg::PartSpec{.group = pair, .op = sg::PartOp::broadcast}}); },
      "root -1");
  refuses([&] { graph.add({.name = "p", .reads = {x}, .part = sg::PartSpec{.group = pair}}, [] {}); }, "has a body");
  refuses([] { sg::Graph none(0); }, "at least 1");
  CHECK(graph.num_nodes() == 0);  // a refused node leaves nothing behind
  CHECK_NOTHROW(graph.add({.name = "n", .reads = {x}}));
  CHECK(graph.num_accesses({0}) == 1);
}
