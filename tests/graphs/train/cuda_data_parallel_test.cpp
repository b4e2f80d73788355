#include <catch2/catch_test_macros.hpp>
#include <cmath>

#include "backends/loopback/world.hpp"
#include "graphs/train/data_parallel.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;

TEST_CASE("data parallelism on two logical devices gives the results of loopback", "[graphs][cuda][data_parallel]") {
  constexpr int global = 8, seq = 16, steps = 4;
  const sg::Model model = sg::testing::small_gpt2();
  const auto run        = [&](sg::World& world) {
    sg::DataParallel parallel(
               model, {.global = global, .seq = seq, .optimizer = sg::OptimizerPlan{}, .threads = 2, .seed = 7}, world);
    std::vector<sg::DataParallelResult> results;
    for (int step = 0; step < steps; ++step)
      results.push_back(parallel.step(sg::testing::tokens_for({.global = global, .micro = 1, .seq = seq}, step, 64)));
    return results;
  };
  const auto world = sg::testing::device_world(2, true, {0, 0}), one = sg::testing::device_world(2);
  sg::LoopbackWorld loopback(2);
  const auto found = run(*world), same = run(*one), expected = run(loopback);
  for (std::size_t step = 0; step < steps; ++step) {
    CAPTURE(step);
    CHECK(found[step].loss == same[step].loss);
    CHECK(found[step].logits == same[step].logits);
    CHECK(found[step].gradients == same[step].gradients);
    CHECK(std::abs(found[step].loss - expected[step].loss) < 1e-4 * expected[step].loss);
  }
}
