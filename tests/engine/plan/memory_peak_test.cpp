#include "engine/plan/memory_peak.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <string>

#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

TEST_CASE("the peak of a chain is where most bytes are alive, and lists the live buffers", "[engine][memory_plan]") {
  sg::Graph graph;
  const sg::Lane lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  const auto step     = [&](const char* name, std::int64_t size) {
    return graph.buffer({.name = name, .size_bytes = size});
  };
  const auto kept   = graph.buffer({.name = "kept", .size_bytes = 100, .lifetime = sg::Lifetime::persistent});
  const auto small  = step("small", 64);
  const auto middle = step("middle", 1000);
  const auto large  = step("large", 4000);
  const auto after  = step("after", 4032);
  (void)step("untouched", 1 << 20);
  (void)graph.token(sg::Rank{0}, "token");
  graph.add({.name = "a", .lane = lane, .reads = kept, .writes = small});
  graph.add({.name = "b", .lane = lane, .reads = small, .writes = middle});
  graph.add({.name = "c", .lane = lane, .reads = middle, .writes = large});
  graph.add({.name = "d", .lane = lane, .reads = large, .writes = after});
  graph.add({.name = "e", .lane = lane, .reads = after, .accumulates = kept});
  const sg::MemoryPlan plan = sg::plan_memory(graph);
  const sg::MemoryPeak peak = sg::memory_peak(graph, plan, sg::Rank{0});
  REQUIRE(peak.node);
  CHECK(graph.name(*peak.node) == "d");
  CHECK(peak.alive == std::vector{kept, large, after});
  CHECK(peak.bytes == 128 + 4032 + 4032);
  CHECK(sg::memory_peak(graph, plan, sg::Rank{0}, sg::Space::pinned).alive.empty());
}

TEST_CASE("the bytes alive at the peak equal the arena's lower bound, in any graph", "[engine][memory_plan]") {
  int with_step_buffers = 0;
  for (int seed = 0; seed < sg::testing::cases(200); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), sg::testing::RandomGraphOptions::medium());
    const sg::MemoryPlan plan = sg::plan_memory(graph);
    for (const sg::ArenaPlan& arena : plan.arenas) {
      const sg::MemoryPeak peak = sg::memory_peak(graph, plan, arena.rank, arena.space);
      std::int64_t bytes        = 0;
      for (const sg::Buffer buffer : peak.alive) {
        const sg::BufferSpec& spec = graph.spec(buffer);
        bytes += sg::MemoryPlan::aligned(spec.size_bytes);
        CHECK((spec.rank == arena.rank && spec.space == arena.space && !spec.token));
      }
      CHECK(peak.bytes == bytes);
      CHECK(peak.bytes == arena.lower_bound);
      CHECK(peak.node.has_value() == (arena.lower_bound > arena.persistent_bytes));
      with_step_buffers += peak.node.has_value();
    }
  }
  CHECK(with_step_buffers > sg::testing::at_least(200));
}
