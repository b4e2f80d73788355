// Training steps on a device that executes work as soon as it is enqueued. One thread issues them, on planned streams.
#include <catch2/catch_test_macros.hpp>

#include "graphs/train/broadcast_weights.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/golden.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/eager_world.hpp"

#if !defined(STEPGRAPH_WITH_CUDA)  // in a CUDA build, ops would enqueue CUDA kernels

namespace sg = stepgraph;

TEST_CASE("a step issued to a device trains to the same bits as a step on the CPU", "[graphs][device]") {
  const sg::testing::Golden& golden = sg::testing::golden("gpt2-tiny");
  const sg::Plan plan{.layout = {.dp = 2, .tp = 2, .pp = 2}, .shard = {.strategy = sg::Shard::full, .min_params = 100}};
  const int steps = sg::testing::sanitized() ? 2 : 3, micro = sg::testing::sanitized() ? 2 : 1;
  sg::testing::EagerWorld world(8);
  const auto issued = sg::testing::train(golden, plan, micro, steps, world),
             direct = sg::testing::train(golden, plan, micro, steps);
  CHECK(issued.loss == direct.loss);
  CHECK(issued.grad_norm == direct.grad_norm);
  CHECK(issued.gradients == direct.gradients);
}

TEST_CASE("weights are broadcast and compared on a device by host nodes", "[graphs][device]") {
  sg::testing::EagerWorld world(4);
  sg::Trainer trainer(sg::testing::small_gpt2(), {.layout = {.dp = 4}}, {.global = 4, .micro = 1, .seq = 16}, world,
                      {.threads = 1});
  sg::set_fresh_weights(trainer.run(), 3);
  const std::uint64_t hash = sg::broadcast_weights(trainer.run());
  CHECK(sg::check_weights(trainer.run()) == hash);
}
#endif
