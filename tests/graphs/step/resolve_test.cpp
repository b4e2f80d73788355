#include "graphs/step/builder/resolve.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "engine/base/error.hpp"
#include "graphs/models/mlp.hpp"

namespace sg = stepgraph;

namespace {

const sg::Model model = sg::mlp({.layers = 2, .width = 8, .context = 4, .vocab = 16});
constexpr sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 4};

}  // namespace

TEST_CASE("a plan for one data-parallel rank resolves to a plan without sharding", "[graphs][step]") {
  const sg::Plan plan{.shard = {.strategy = sg::Shard::full, .slots = 3, .static_graph = true}};
  CHECK(sg::resolve(plan, model, batch, true).shard == sg::ShardPlan{.find_unused_parameters = true});
}

TEST_CASE("a forward step drops gathered weights after each use and has no sequence parallelism", "[graphs][step]") {
  const sg::Plan plan{.layout = {.dp = 2, .tp = 2, .sequence_parallel = true},
                      .shard  = {.strategy = sg::Shard::full, .reshard_after_forward = false}};
  const sg::Plan training = sg::resolve(plan, model, batch, true), forward = sg::resolve(plan, model, batch, false);
  CHECK(training == plan);
  CHECK_FALSE(forward.layout.sequence_parallel);
  CHECK(forward.shard.reshard_after_forward);
}

TEST_CASE("a resolved plan resolves to itself, and the given plan is unchanged", "[graphs][step]") {
  const bool trains = GENERATE(true, false);
  const int dp      = GENERATE(1, 2);
  sg::Plan plan{.layout = {.dp = dp, .tp = 2}, .shard = {.strategy = sg::Shard::full}};
  plan.shard.keep_between_microbatches = true;
  const sg::Plan given                 = plan;
  const sg::Plan once                  = sg::resolve(plan, model, batch, trains);
  CHECK(plan == given);
  CHECK(sg::resolve(once, model, batch, trains) == once);
}

TEST_CASE("a plan that does not fit the batch does not resolve", "[graphs][step]") {
  CHECK_THROWS_AS(sg::resolve({.layout = {.dp = 3}}, model, batch, true), sg::Error);
  CHECK_THROWS_AS(sg::resolve({.layout = {.dp = 0}}, model, batch, true), sg::Error);
}
