#include "graphs/step/builder/weight_storage.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <string>

#include "engine/base/error.hpp"

namespace sg = stepgraph;
using sg::Shard;
using sg::WeightTensor;

namespace {

sg::Plan plan_of(Shard strategy, const sg::PrecisionPlan& precision = {}) {
  sg::Plan plan{.layout = {.dp = 4}, .precision = precision};
  plan.shard.strategy = strategy;
  if (strategy == Shard::hybrid) plan.shard.group = 2;
  return plan;
}

// One line per stored tensor.
std::string table(const sg::Plan& plan, const sg::WeightTraits& weight, const sg::WeightStorageOptions& options = {}) {
  std::string lines;
  for (const WeightTensor tensor : sg::all_weight_tensors) {
    const sg::WeightEntry entry = sg::weight_entry(plan, weight, tensor, options);
    if (entry.extent != sg::Extent::none) lines += sg::str(to_string(tensor), ": ", to_string(entry), "\n");
  }
  return lines;
}

constexpr sg::WeightTraits replicated{}, in_flat{.sharded = true, .flat = true}, by_rows{.sharded = true};

}  // namespace

TEST_CASE("the strategy determines how a sharded weight is stored", "[graphs][step][shard]") {
  struct Case {
    Shard strategy;
    std::string lines;
  };
  const Case given = GENERATE(values<Case>({
      {Shard::zero1,
       "value: whole f32 persistent device flat\n"
       "gradient: shard f32 step device unit\n"
       "first moment: shard f32 persistent device flat\n"
       "second moment: shard f32 persistent device flat\n"},
      {Shard::grad_op,
       "value: whole f32 persistent device flat\n"
       "gradient: shard f32 step device flat\n"
       "first moment: shard f32 persistent device flat\n"
       "second moment: shard f32 persistent device flat\n"},
      {Shard::full,
       "value: shard f32 persistent device flat\n"
       "gradient: shard f32 step device flat\n"
       "first moment: shard f32 persistent device flat\n"
       "second moment: shard f32 persistent device flat\n"},
      {Shard::hybrid,
       "value: shard f32 persistent device flat\n"
       "gradient: shard f32 step device flat\n"
       "first moment: shard f32 persistent device flat\n"
       "second moment: shard f32 persistent device flat\n"},
  }));
  CAPTURE(to_string(given.strategy));
  CHECK(table(plan_of(given.strategy), in_flat) == given.lines);
}

TEST_CASE("a weight outside all units is whole in every strategy, and its gradient is in a bucket",
          "[graphs][step][shard]") {
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::grad_op, Shard::full, Shard::hybrid);
  CAPTURE(to_string(strategy));
  CHECK(table(plan_of(strategy), replicated) ==
        "value: whole f32 persistent device own\n"
        "gradient: whole f32 step device bucket\n"
        "first moment: whole f32 persistent device own\n"
        "second moment: whole f32 persistent device own\n");
}

TEST_CASE("gradients have their own buffers with one data-parallel rank, and without bucket views",
          "[graphs][step][shard]") {
  sg::Plan plan = plan_of(Shard::none);
  SECTION("one rank") { plan.layout.dp = 1; }
  SECTION("no views") { plan.shard.bucket_views = false; }
  CHECK(to_string(sg::weight_entry(plan, replicated, WeightTensor::gradient)) == "whole f32 step device own");
}

TEST_CASE("a weight that is cut by rows has its own buffers", "[graphs][step][shard]") {
  CHECK(table(plan_of(Shard::full), by_rows) ==
        "value: shard f32 persistent device own\n"
        "gradient: shard f32 step device own\n"
        "first moment: shard f32 persistent device own\n"
        "second moment: shard f32 persistent device own\n");
  CHECK(to_string(sg::weight_entry(plan_of(Shard::zero1), by_rows, WeightTensor::gradient)) ==
        "shard f32 step device unit");
}

TEST_CASE("a 2-byte value has a master, and its gradient may keep the 2-byte type", "[graphs][step][shard]") {
  const sg::PrecisionPlan bf16{.param = sg::DType::bf16, .reduce = sg::DType::bf16};
  CHECK(table(plan_of(Shard::full, bf16), in_flat) ==
        "value: shard bf16 persistent device flat\n"
        "gradient: shard f32 step device flat\n"
        "master: shard f32 persistent device flat\n"
        "first moment: shard f32 persistent device flat\n"
        "second moment: shard f32 persistent device flat\n");
  sg::PrecisionPlan rounded        = bf16;
  rounded.keep_low_precision_grads = true;
  const Shard strategy             = GENERATE(Shard::zero1, Shard::grad_op, Shard::full, Shard::hybrid);
  CAPTURE(to_string(strategy));
  CHECK(to_string(sg::weight_entry(plan_of(strategy, rounded), in_flat, WeightTensor::gradient)) ==
        "shard bf16 step device flat");
}

TEST_CASE("a norm's weight is stored in the type for norms", "[graphs][step][shard]") {
  const sg::PrecisionPlan precision{.param = sg::DType::bf16, .norm = sg::DType::f32};
  CHECK(table(plan_of(Shard::full, precision), {.norm = true}) ==
        "value: whole f32 persistent device own\n"
        "gradient: whole f32 step device bucket\n"
        "first moment: whole f32 persistent device own\n"
        "second moment: whole f32 persistent device own\n");
}

TEST_CASE("a weight tied to another one on the same rank stores only its gradient", "[graphs][step][shard]") {
  CHECK(table(plan_of(Shard::full), {.sharded = true, .tied_here = true}) ==
        "value: shard f32 persistent device tied\n"
        "gradient: shard f32 step device own\n");
}

TEST_CASE("sgd has one moment, a forward step has only values, and kept gradients are persistent",
          "[graphs][step][shard]") {
  sg::Plan plan       = plan_of(Shard::grad_op);
  plan.optimizer.kind = sg::OptimizerKind::sgd;
  CHECK(table(plan, in_flat, {.keep_gradients = true}) ==
        "value: whole f32 persistent device flat\n"
        "gradient: shard f32 persistent device flat\n"
        "first moment: shard f32 persistent device flat\n");
  CHECK(table(plan, in_flat, {.trains = false}) == "value: whole f32 persistent device flat\n");
}
