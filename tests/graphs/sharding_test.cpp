// Sharding changes where things are, never what they are.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/error.hpp"
#include "tests/support/golden.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/short_training.hpp"

namespace sg = stepgraph;
using sg::Shard;
using sg::testing::golden;
using sg::testing::History;

namespace {

sg::Plan plan_of(sg::LayoutSpec layout, sg::ShardPlan shard) {
  shard.min_params = 100;
  return {.layout = layout, .shard = shard};
}

// Losses, norms and first gradients.
void check_same_bits(const std::string& model, const sg::Plan& plan, int micro, int steps) {
  sg::Plan whole          = plan;
  whole.shard             = {};
  const auto expected     = sg::testing::train(golden(model), whole, micro, steps);
  const auto got          = sg::testing::train(golden(model), plan, micro, steps);
  CHECK(got.loss == expected.loss);
  CHECK(got.grad_norm == expected.grad_norm);
  CHECK(got.gradients == expected.gradients);
}

}  // namespace

TEST_CASE("every strategy that reduces once a step trains to the same bits", "[graphs][shard]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const Shard strategy    = GENERATE(Shard::zero1, Shard::grad_op, Shard::full);
  const bool flat         = GENERATE(true, false);
  const int dp            = GENERATE(2, 4, 8);
  CAPTURE(model, to_string(strategy), flat, dp);
  check_same_bits(model, plan_of({.dp = dp}, {.strategy = strategy, .flat = flat}), 1, sg::testing::cases(20));
}
