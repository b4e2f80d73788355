// The golden models on a GPU: the same verified and planned graphs as on the CPU, on streams.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "graphs/train/broadcast_weights.hpp"
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

void check_layouts(const std::string& model) {
  using enum sg::Shard;
  const Case test = GENERATE(Case{1, 1, 1, none}, Case{2, 1, 1, none}, Case{1, 2, 1, none}, Case{1, 1, 2, none},
                             Case{2, 2, 2, none}, Case{2, 1, 1, full}, Case{2, 2, 2, full}, Case{2, 1, 1, zero1});
  const int ranks = test.dp * test.tp * test.pp;
  // Under compute-sanitizer, tests only one rank, two data-parallel ranks, and all kinds of parallelism together.
  if (sg::testing::sanitized() && (ranks == 8 ? test.strategy != full : test.strategy != none || test.dp < ranks))
    return;
  CAPTURE(model, test.dp, test.tp, test.pp, to_string(test.strategy));
  const auto world = sg::testing::device_world(ranks);
  const int steps  = std::max(3, sg::testing::cases(20));
  sg::testing::check_golden_bounds(golden(model), sg::testing::train(golden(model), plan_of(test), 2, steps, *world),
                                   steps);
}

void check_captured(const std::string& model) {
  const Case test{2, 2, 2, sg::Shard::full};
  const int steps  = std::max(3, sg::testing::cases(5));
  const auto train = [&](bool capture) {
    const auto world = sg::testing::device_world(8, capture);
    return sg::testing::train(golden(model), plan_of(test), 1, steps, *world);
  };
  const auto captured = train(true), issued = train(false);
  CHECK(captured.loss == issued.loss);
  CHECK(captured.grad_norm == issued.grad_norm);
  CHECK(captured.gradients == issued.gradients);
}

}  // namespace

TEST_CASE("a GPU trains GPT-2 as transformers does, in every layout", "[graphs][cuda][golden]") {
  check_layouts("gpt2-tiny");
}
TEST_CASE("a GPU trains Llama as transformers does, in every layout", "[graphs][cuda][golden]") {
  check_layouts("llama-tiny");
}

TEST_CASE("weights are broadcast and compared on a GPU", "[graphs][cuda]") {
  const auto world = sg::testing::device_world(2);
  sg::Trainer trainer(golden("gpt2-tiny").model, {.layout = {.dp = 2}}, {.global = 2, .micro = 1, .seq = 8}, *world);
  sg::set_fresh_weights(trainer.run(), 3);
  const std::uint64_t hash = sg::broadcast_weights(trainer.run());
  CHECK(sg::check_weights(trainer.run()) == hash);
}

TEST_CASE("a GPU trains GPT-2 to the same bits with and without capture", "[graphs][cuda]") {
  check_captured("gpt2-tiny");
}
TEST_CASE("a GPU trains Llama to the same bits with and without capture", "[graphs][cuda]") {
  check_captured("llama-tiny");
}
