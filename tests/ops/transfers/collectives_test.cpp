#include "ops/transfers/collectives.hpp"

#include <array>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <numeric>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

constexpr int ranks = 4;

// Four ranks with two persistent buffers of eight floats each, x and y; element i of rank r's x is 10 * r + i.
struct World {
  World() : graph(ranks), world(ranks) {
    std::vector<sg::Rank> all;
    for (int rank = 0; rank < ranks; ++rank) {
      all.push_back(sg::Rank{rank});
      for (auto* list : {&x, &y})
        list->push_back(graph.buffer({.name       = list == &x ? "x" : "y",
                                      .rank       = sg::Rank{rank},
                                      .size_bytes = 32,
                                      .type       = sg::DType::f32,
                                      .lifetime   = sg::Lifetime::persistent}));
    }
    group = graph.group({.name = "all", .ranks = all});
  }
  static auto each(const std::vector<sg::Buffer>& list) {
    return [&list](sg::Rank rank) { return list[static_cast<std::size_t>(sg::index(rank))]; };
  }
  // A quarter of a buffer: the first, or the rank's own.
  static auto first(const std::vector<sg::Buffer>& list) {
    return [&list](sg::Rank rank) { return list[static_cast<std::size_t>(sg::index(rank))].range(0, 8); };
  }
  // The values of x and y of a rank after a run.
  std::pair<std::vector<float>, std::vector<float>> run(int rank) {
    sg::verify(graph);
    sg::Executor executor({.threads = 1});
    const sg::Program program(graph, world);
    for (int r = 0; r < ranks; ++r) {
      const auto values = program.memory().span<float>(x[static_cast<std::size_t>(r)]);
      std::iota(values.begin(), values.end(), static_cast<float>(10 * r));
    }
    executor.run(program);
    const auto a = program.memory().span<float>(x[static_cast<std::size_t>(rank)]);
    const auto b = program.memory().span<float>(y[static_cast<std::size_t>(rank)]);
    return {{a.begin(), a.end()}, {b.begin(), b.end()}};
  }

  sg::Graph graph;
  sg::LoopbackWorld world;
  sg::Group group;
  std::vector<sg::Buffer> x, y;
};

using List = std::vector<float>;

}  // namespace

TEST_CASE("each builder adds one part per member, with the operation of its name", "[ops][collectives]") {
  World w;
  SECTION("all_reduce in place") {
    CHECK(sg::all_reduce(w.graph, {.name = "c", .group = w.group, .in = World::each(w.x)}).size() == ranks);
    CHECK(w.run(2).first == List{60, 64, 68, 72, 76, 80, 84, 88});
  }
  SECTION("reduce, in place at the root; the others only read") {
    const auto nodes =
        sg::reduce(w.graph, {.name = "c", .group = w.group, .in = World::each(w.x), .root = sg::Rank{1}});
    CHECK(w.graph.part(nodes[0]).bytes_written == 0);
    CHECK(w.run(1).first == List{60, 64, 68, 72, 76, 80, 84, 88});
    CHECK(w.run(0).first == List{0, 1, 2, 3, 4, 5, 6, 7});
  }
  SECTION("all_gather, and in place") {
    sg::all_gather(w.graph, {.name = "c", .group = w.group, .in = World::first(w.x), .out = World::each(w.y)});
    sg::all_gather(w.graph, {.name = "d", .group = w.group, .out = World::each(w.x)});
    const auto [x, y] = w.run(3);
    CHECK(y == List{0, 1, 10, 11, 20, 21, 30, 31});
    CHECK(x == List{0, 1, 12, 13, 24, 25, 36, 37});
  }
  SECTION("reduce_scatter, and in place") {
    sg::reduce_scatter(w.graph, {.name = "c", .group = w.group, .in = World::each(w.x), .out = World::first(w.y)});
    sg::reduce_scatter(w.graph, {.name = "d", .group = w.group, .in = World::each(w.x)});
    const auto [x, y] = w.run(1);
    CHECK(y == List{68, 72, 0, 0, 0, 0, 0, 0});
    CHECK(x == List{10, 11, 68, 72, 14, 15, 16, 17});
  }
  SECTION("broadcast, and in place") {
    sg::broadcast(
        w.graph, {.name = "c", .group = w.group, .in = World::each(w.x), .out = World::each(w.y), .root = sg::Rank{2}});
    sg::broadcast(w.graph, {.name = "d", .group = w.group, .out = World::each(w.x), .root = sg::Rank{3}});
    const auto [x, y] = w.run(0);
    CHECK(y == List{20, 21, 22, 23, 24, 25, 26, 27});
    CHECK(x == List{30, 31, 32, 33, 34, 35, 36, 37});
  }
  SECTION("scatter and gather ask only the root for all") {
    sg::scatter(w.graph,
                {.name = "c", .group = w.group, .in = World::each(w.x), .out = World::first(w.y), .root = sg::Rank{1}});
    const auto nodes = sg::gather(
        w.graph,
        {.name = "d", .group = w.group, .in = World::first(w.y), .out = World::each(w.x), .root = sg::Rank{0}});
    CHECK(w.graph.num_accesses(nodes[0]) == 2);
    CHECK(w.graph.num_accesses(nodes[1]) == 1);
    CHECK(w.run(3).second == List{16, 17, 0, 0, 0, 0, 0, 0});
    CHECK(w.run(0).first == List{10, 11, 12, 13, 14, 15, 16, 17});
  }
  SECTION("all_to_all, and in place") {
    sg::all_to_all(w.graph, {.name = "c", .group = w.group, .in = World::each(w.x), .out = World::each(w.y)});
    sg::all_to_all(w.graph, {.name = "d", .group = w.group, .in = World::each(w.x)});
    const auto [x, y] = w.run(1);
    CHECK(y == List{2, 3, 12, 13, 22, 23, 32, 33});
    CHECK(x == y);
  }
  SECTION("permute: a chain, whose ends have one neighbour") {
    sg::permute(
        w.graph,
        {.name = "c", .group = w.group, .in = World::each(w.x), .out = World::each(w.y), .peer = [](sg::Rank rank) {
           return sg::index(rank) == 3 ? sg::Rank{-1} : sg::Rank{sg::index(rank) + 1};
         }});
    CHECK(w.run(0).second == List(8));
    CHECK(w.run(2).second == List{10, 11, 12, 13, 14, 15, 16, 17});
  }
}

TEST_CASE("shards may differ in size: one access for each member", "[ops][collectives]") {
  World w;
  // Rank r has r elements.
  const auto mine = [&](sg::Rank rank) { return World::each(w.x)(rank).range(0, 4 * sg::index(rank)); };
  const auto all  = [&](sg::Rank rank) {
    sg::AccessList list;
    for (int k = 0; k < ranks; ++k) list.push_back(World::each(w.y)(rank).range(4 * (k * (k - 1) / 2), 4 * k));
    return list;
  };
  sg::all_gather(w.graph, {.name = "c", .group = w.group, .in = mine, .out = all});
  CHECK(w.run(0).second == List{10, 20, 21, 30, 31, 32, 0, 0});
}

TEST_CASE("a part costs the bytes it reads and writes, and the bytes it sends directly to other members",
          "[ops][collectives]") {
  World w;
  using Costs      = std::array<double, 2>;
  const auto costs = [&](const std::vector<sg::Node>& nodes, std::size_t member) {
    return Costs{w.graph.cost(nodes[member]).bytes_moved, w.graph.cost(nodes[member]).bytes_sent};
  };
  const sg::Collective spec{
      .name = "c", .group = w.group, .in = World::each(w.x), .out = World::each(w.y), .root = sg::Rank{0}};
  sg::Collective to_first = spec, from_first = spec;
  to_first.out  = World::first(w.y);
  from_first.in = World::first(w.x);
  CHECK(costs(sg::all_reduce(w.graph, spec), 1) == Costs{64.0, 96.0});
  CHECK(costs(sg::reduce(w.graph, spec), 0) == Costs{64.0, 0.0});
  CHECK(costs(sg::reduce(w.graph, spec), 1) == Costs{32.0, 32.0});
  CHECK(costs(sg::all_gather(w.graph, from_first), 1) == Costs{40.0, 24.0});
  CHECK(costs(sg::reduce_scatter(w.graph, to_first), 1) == Costs{40.0, 24.0});
  CHECK(costs(sg::broadcast(w.graph, spec), 0) == Costs{64.0, 96.0});
  CHECK(costs(sg::broadcast(w.graph, spec), 1) == Costs{32.0, 0.0});
  CHECK(costs(sg::scatter(w.graph, to_first), 0) == Costs{40.0, 24.0});
  CHECK(costs(sg::gather(w.graph, from_first), 2) == Costs{8.0, 8.0});
  CHECK(costs(sg::all_to_all(w.graph, spec), 2) == Costs{64.0, 24.0});
  CHECK(costs(sg::barrier(w.graph, spec), 2) == Costs{0.0, 0.0});
}

TEST_CASE("a collective with missing arguments is refused by name", "[ops][collectives][refuses]") {
  World w;
  const auto says = [](const char* what) { return MessageMatches(ContainsSubstring(what)); };
  CHECK_THROWS_MATCHES(sg::all_reduce(w.graph, {.name = "c", .group = w.group}), sg::Error, says("'c' needs `in`"));
  CHECK_THROWS_MATCHES(sg::gather(w.graph, {.name = "c", .group = w.group, .in = World::each(w.x)}), sg::Error,
                       says("needs `in and out`"));
  CHECK_THROWS_MATCHES(
      sg::permute(w.graph, {.name = "c", .group = w.group, .in = World::each(w.x), .out = World::each(w.y)}), sg::Error,
      says("needs `in, out and peer`"));
  CHECK_THROWS_MATCHES(sg::reduce(w.graph, {.name = "c", .group = w.group, .in = World::each(w.x)}), sg::Error,
                       says("set .root to the rank that receives"));
  CHECK_THROWS_MATCHES(sg::permute(w.graph, {.name  = "c",
                                             .group = w.group,
                                             .in    = World::each(w.x),
                                             .out   = World::each(w.y),
                                             .peer  = [](sg::Rank rank) { return rank; }}),
                       sg::Error, says("cannot be its own peer"));
  CHECK_THROWS_MATCHES(
      sg::all_gather(w.graph, {.name  = "c",
                               .group = w.group,
                               .out   = [&](sg::Rank rank) { return World::each(w.x)(rank).strided(0, 4, 8, 4); }}),
      sg::Error, says("a shard is not one access"));
}
