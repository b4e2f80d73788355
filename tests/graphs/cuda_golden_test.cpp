// The golden models on a GPU: the same graphs, proved and planned as on the CPU, on streams.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "graphs/broadcast_weights.hpp"
#include "tests/support/device_case.hpp"
#include "tests/support/golden.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::testing::golden;

namespace {

struct Case {
  int dp, tp, pp;
  sg::Shard strategy;
};

sg::Plan plan_of(const Case& test) {
  return {.layout = {.dp = test.dp, .tp = test.tp, .pp = test.pp},
          .shard  = {.strategy = test.strategy, .min_params = 100}};
}

}  // namespace

TEST_CASE("a GPU trains as transformers does, in every layout", "[graphs][cuda][golden]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  using enum sg::Shard;
  const Case test = GENERATE(Case{1, 1, 1, none}, Case{2, 1, 1, none}, Case{1, 2, 1, none}, Case{1, 1, 2, none},
                             Case{2, 2, 2, none}, Case{2, 1, 1, full}, Case{2, 2, 2, full}, Case{2, 1, 1, zero1});
  if (sg::testing::scale() > 1 && (test.dp * test.tp * test.pp) % 8 > 1) return;  // one rank, and eight
  CAPTURE(model, test.dp, test.tp, test.pp, to_string(test.strategy));
  const auto world = sg::testing::device_world(test.dp * test.tp * test.pp);
  const int steps  = std::max(2, sg::testing::cases(20));
  sg::testing::check_golden_bounds(golden(model), sg::testing::train(golden(model), plan_of(test), 2, steps, *world),
                                   steps);
}

TEST_CASE("weights are broadcast and compared on a GPU", "[graphs][cuda]") {
  const auto world = sg::testing::device_world(2);
  sg::Trainer trainer(golden("gpt2-tiny").model, {.layout = {.dp = 2}}, {.global = 2, .micro = 1, .seq = 8}, *world);
  sg::set_fresh_weights(trainer.run(), 3);
  const std::uint64_t hash = sg::broadcast_weights(trainer.run());
  CHECK(sg::check_weights(trainer.run()) == hash);
}

TEST_CASE("captured or issued step by step, a GPU trains to the same bits", "[graphs][cuda]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const Case test{2, 2, 2, sg::Shard::full};
  const auto train = [&](bool capture) {
    const auto world = sg::testing::device_world(8, capture);
    return sg::testing::train(golden(model), plan_of(test), 1, 5, *world);
  };
  const auto captured = train(true), issued = train(false);
  CHECK(captured.loss == issued.loss);
  CHECK(captured.grad_norm == issued.grad_norm);
  CHECK(captured.gradients == issued.gradients);
}
