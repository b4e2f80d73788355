#include "engine/plan/planned_sizes.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>

#include "engine/base/error.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

namespace {

// Work of several ranks in all spaces. `alike`: ranks with equal buffers, which share packings, also between spaces.
sg::Graph graph_in_spaces(std::uint64_t seed, bool alike) {
  constexpr int ranks = 3, nodes = 120;
  sg::Graph graph(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    sg::testing::Random random(alike ? seed : 10 * seed + static_cast<std::uint64_t>(rank));
    const sg::Rank at{rank};
    std::vector<sg::Buffer> buffers;
    const auto make = [&](sg::Space space, sg::Lifetime lifetime) {
      const std::int64_t size = random.between(1, 40) * (space == sg::Space::device ? 64 : 700);
      buffers.push_back(graph.buffer({.name       = sg::str("b", buffers.size()),
                                      .rank       = at,
                                      .size_bytes = size,
                                      .space      = space,
                                      .lifetime   = lifetime}));
    };
    for (const sg::Space space : {sg::Space::device, sg::Space::pinned, sg::Space::disk}) {
      make(space, sg::Lifetime::persistent);
      for (int i = 0; i < 25; ++i) make(space, sg::Lifetime::step);
    }
    for (int i = 0; i < nodes; ++i) {
      const auto kind = random.chance(60) ? sg::LaneKind::compute : sg::LaneKind::host;
      // Each buffer is used for a while.
      const auto pick = [&] {
        const auto near = static_cast<std::uint64_t>(i) * 25 / nodes + random.below(5);
        return buffers[1 + random.below(3) * 26 + std::min<std::uint64_t>(near, 24)];
      };
      graph.add({.name            = sg::str("n", i),
                 .lane            = graph.lane(at, kind),
                 .writes          = {pick(), pick()},
                 .device          = true,
                 .workspace_bytes = random.between(0, 4) * 100});
    }
  }
  return graph;
}

void check_sizes(const sg::Graph& graph, const sg::MemoryPlanOptions& options) {
  const sg::MemoryPlan plan    = sg::plan_memory(graph, options);
  const sg::PlannedSizes sizes = sg::planned_sizes(graph, options);
  CHECK(sizes.arenas.size() == plan.arenas.size());
  for (const sg::ArenaPlan& arena : plan.arenas) CHECK(sizes.arena(arena.rank, arena.space) == arena.size_bytes);
  for (const sg::Rank rank : graph.ranks()) CHECK(sizes.device_bytes(rank) == plan.device_bytes(rank));
  for (const sg::Space space : {sg::Space::device, sg::Space::pinned, sg::Space::disk}) {
    CAPTURE(to_string(space));
    const sg::PlannedSizes own = sg::planned_sizes(graph, options, space);
    for (const auto& [where, bytes] : own.arenas) CHECK(where.second == space);
    for (const sg::Rank rank : graph.ranks()) CHECK(own.arena(rank, space) == plan.arena(rank, space).size_bytes);
    if (space != sg::Space::device) continue;
    for (const sg::Rank rank : graph.ranks()) CHECK(own.device_bytes(rank) == plan.device_bytes(rank));
  }
}

}  // namespace

TEST_CASE("planned sizes are those of the plan", "[engine][plan]") {
  for (int seed = 0; seed < sg::testing::cases(12); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph = graph_in_spaces(static_cast<std::uint64_t>(seed), seed % 2 == 0);
    for (const sg::Reuse reuse : {sg::Reuse::free, sg::Reuse::tight})
      check_sizes(graph, {.reuse = reuse, .workspaces = {.bodies = true}});
  }
}

TEST_CASE("planned sizes of random graphs are those of the plan", "[engine][plan]") {
  for (int seed = 0; seed < sg::testing::cases(40); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), sg::testing::RandomGraphOptions::medium());
    check_sizes(graph, {.reuse = seed % 2 == 0 ? sg::Reuse::tight : sg::Reuse::free});
  }
}

TEST_CASE("a graph without buffers has no sizes", "[engine][plan]") {
  const sg::PlannedSizes sizes = sg::planned_sizes(sg::Graph());
  CHECK(sizes.arenas.empty());
  CHECK(sizes.device_bytes(sg::Rank{0}) == 0);
}
