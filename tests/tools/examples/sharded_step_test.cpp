#include "tools/examples/sharded_step.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"

namespace sg = stepgraph;

namespace {

std::vector<float> losses(const sg::ShardedStepSpec& spec, int steps, int threads) {
  const sg::ShardedStep step = sg::sharded_step(spec);
  sg::verify(step.graph);
  sg::LoopbackWorld world(spec.ranks);
  sg::Executor executor({.threads = threads});
  const sg::Program program(step.graph, world);
  sg::fill(step, program.memory(), 1);
  std::vector<float> all;
  for (int i = 0; i < steps; ++i) {
    executor.run(program);
    all.push_back(program.memory().span<float>(step.loss.back())[0]);
  }
  return all;
}

}  // namespace

TEST_CASE("the sharded step learns", "[graphs][sharded]") {
  const auto all = losses({.ranks = 4, .width = 16, .batch = 16}, 60, 2);
  CHECK(all.back() < 0.6f * all.front());
}

TEST_CASE("losses have the same bits for any number of threads and slots", "[graphs][sharded]") {
  const sg::ShardedStepSpec spec{.ranks = 4, .width = 16, .batch = 8};
  const auto reference = losses(spec, 10, 1);
  CHECK(losses(spec, 10, 2) == reference);
  for (const int slots : {1, 3, 4}) {
    sg::ShardedStepSpec other = spec;
    other.slots               = slots;
    CHECK(losses(other, 10, 2) == reference);
  }
}

TEST_CASE("the number of slots limits the prefetch", "[graphs][sharded]") {
  const int slots            = GENERATE(1, 2, 3);
  const sg::ShardedStep step = sg::sharded_step({.ranks = 2, .layers = 5, .width = 4, .batch = 2, .slots = slots});
  CAPTURE(slots);
  const sg::Graph& graph = step.graph;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (std::size_t layer = 0; layer < 5; ++layer) {
      for (std::size_t gathered = layer + 1; gathered < 5; ++gathered) {
        const sg::Node gather = step.gathers[rank][gathered], forward = step.forwards[rank][layer];
        const bool ordered = sg::reaches(graph, forward, gather) || sg::reaches(graph, gather, forward);
        CHECK(ordered == (gathered - layer >= static_cast<std::size_t>(slots)));
      }
    }
  }
}

TEST_CASE("the number of slots changes edges, never the set of nodes", "[graphs][sharded]") {
  const auto one = sg::sharded_step({.slots = 1}), three = sg::sharded_step({.slots = 3});
  REQUIRE(one.graph.num_nodes() == three.graph.num_nodes());
  for (std::uint32_t i = 0; i < one.graph.num_nodes(); ++i)
    CHECK(one.graph.describe(sg::Node{i}) == three.graph.describe(sg::Node{i}));
}

TEST_CASE("an impossible sharded step is refused", "[graphs][sharded][refuses]") {
  CHECK_THROWS_AS(sg::sharded_step({.ranks = 3, .width = 4}), sg::Error);
  CHECK_THROWS_AS(sg::sharded_step({.slots = 0}), sg::Error);
}
