#include <catch2/catch_test_macros.hpp>

#include "backends/loopback/world.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/scale.hpp"
#include "tools/examples/sharded_step.hpp"

namespace sg = stepgraph;

TEST_CASE("many ranks with a few hundred nodes each are verified and run on 2 threads", "[engine][scale]") {
  // 6 nodes per layer and rank, plus the loss.
  const int ranks            = sg::testing::sanitized() ? 64 : 256;
  const sg::ShardedStep step = sg::sharded_step({.ranks = ranks, .layers = 40, .width = 16, .batch = 1});
  REQUIRE(step.graph.num_nodes() >= static_cast<std::size_t>(ranks) * 200);
  REQUIRE_NOTHROW(sg::verify(step.graph));
  sg::LoopbackWorld world(ranks);
  sg::Executor executor({.threads = 2});
  const sg::Program program(step.graph, world);
  sg::fill(step, program.memory(), 3);
  executor.run(program);
  const float first = program.memory().span<float>(step.loss.back())[0];
  CHECK(first > 0);
  CHECK(program.memory().span<float>(step.loss[0])[0] == first);
  executor.run(program);
  CHECK(program.memory().span<float>(step.loss[0])[0] != first);
}
