#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <limits>

#include "backends/loopback/world.hpp"
#include "tests/support/allocations.hpp"
#include "tests/support/short_training.hpp"

namespace sg = stepgraph;

namespace {

// The number of allocations of one run of a training step, after warm-up runs. The minimum of several runs: a queue of
// the scheduler may grow in any run in which a thread is delayed.
std::int64_t allocations_of_step(int layers, const sg::Plan& plan, double dropout) {
  const sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};
  const sg::Model model =
      sg::gpt2({.layers = layers, .width = 128, .heads = 4, .context = 16, .vocab = 512, .dropout = dropout});
  sg::LoopbackWorld world(sg::Layout(plan.layout).num_ranks());
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 7});
  for (int step = 0; step < 10; ++step) trainer.step(sg::testing::tokens_for(batch, step, model.vocab));
  std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
  for (int run = 0; run < 8; ++run) {
    const std::int64_t before = sg::testing::allocations();
    trainer.run().run();
    fewest = std::min(fewest, sg::testing::allocations() - before);
  }
  return fewest;
}

}  // namespace

TEST_CASE("the nodes of a training step allocate nothing", "[graphs][step][allocations]") {
  if (!sg::testing::counts_allocations()) SKIP("sanitizers have allocators of their own");
  const auto layout = GENERATE(sg::LayoutSpec{}, sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2, .sequence_parallel = true});
  const auto type   = GENERATE(sg::DType::f32, sg::DType::bf16, sg::DType::f16);
  const sg::Plan plan{.layout = layout, .precision = {.param = type}, .recompute = sg::Recompute::full};
  CAPTURE(to_string(layout), type);
  // Starting a run allocates, independent of the number of nodes.
  CHECK(allocations_of_step(2, plan, 0.1) == allocations_of_step(6, plan, 0.1));
}
