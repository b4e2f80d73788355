// Combinations of sharding: groups of replicas, reducing after each microbatch, and keeping weights between
// microbatches, with tensor and pipeline parallelism, schedules and bf16.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <map>

#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::ReduceWhen;
using sg::Shard;
using sg::testing::History;

namespace {

constexpr int num_steps = 3;

// One combination of model and sharding. Not all combinations are tested, to save time.
struct Form {
  std::string kind;
  Shard strategy;
  bool flat;
  sg::DType travel = sg::DType::f32;  // type of the gradients between ranks
};

sg::Model model_of(const std::string& kind) {
  return kind == "gpt2" ? sg::testing::small_gpt2() : sg::testing::small_llama();
}

sg::BatchSpec batch_of(const sg::Plan& plan, int microbatches) {
  return {.global = plan.layout.dp * microbatches, .micro = 1, .seq = 8};
}

// The run without sharding and without a pipeline, which changes no bits. Cached, because several runs are compared
// with it.
const History& whole(const std::string& kind, sg::Plan plan, int microbatches) {
  static std::map<std::string, History> runs;
  plan.shard            = {};
  plan.pipeline         = {};
  plan.layout.pp        = 1;
  const std::string key = sg::str(kind, " ", to_string(plan.layout), plan.layout.sequence_parallel, " ",
                                  plan.precision.param, plan.precision.reduce_type(), microbatches);
  const auto found      = runs.find(key);
  if (found != runs.end()) return found->second;
  return runs.emplace(key, sg::testing::train(model_of(kind), plan, batch_of(plan, microbatches), num_steps))
      .first->second;
}

History sharded(const std::string& kind, const sg::Plan& plan, int microbatches) {
  return sg::testing::train(model_of(kind), plan, batch_of(plan, microbatches), num_steps);
}

void check_near(const History& got, const History& expected) {
  CHECK(sg::testing::loss_distance(got, expected) < 1e-6);
  CHECK(sg::testing::norm_distance(got, expected) < 1e-6);
}

sg::ShardPlan hybrid(int group, ReduceWhen reduce, bool flat) {
  return {.strategy = Shard::hybrid, .reduce = reduce, .min_params = 50, .flat = flat, .group = group};
}

}  // namespace

TEST_CASE("hybrid sharding works with tensor and with pipeline parallelism", "[graphs][shard]") {
  const bool flat             = GENERATE(true, false);
  const std::string kind      = flat ? "gpt2" : "llama";
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{.dp = 4, .tp = 2}, sg::LayoutSpec{.dp = 4, .pp = 2},
                                         sg::LayoutSpec{.dp = 4, .tp = 2, .sequence_parallel = true});
  const auto reduce           = GENERATE(ReduceWhen::last, ReduceWhen::each);
  CAPTURE(kind, to_string(layout), layout.sequence_parallel, to_string(reduce), flat);
  if (sg::testing::scale() > 1 && (reduce == ReduceWhen::last) == layout.sequence_parallel) return;
  const sg::Plan plan{.layout = layout, .shard = hybrid(2, reduce, flat)};
  check_near(sharded(kind, plan, 2), whole(kind, plan, 2));
}

TEST_CASE("hybrid sharding with one group of all ranks has the bits of no sharding", "[graphs][shard]") {
  const bool flat             = GENERATE(true, false);
  const std::string kind      = flat ? "llama" : "gpt2";
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{.dp = 2, .tp = 2}, sg::LayoutSpec{.dp = 2, .pp = 2});
  CAPTURE(kind, to_string(layout), flat);
  const sg::Plan plan{.layout = layout, .shard = hybrid(2, ReduceWhen::last, flat)};
  CHECK(sharded(kind, plan, 2) == whole(kind, plan, 2));
}

TEST_CASE("reducing after each microbatch works with pipelines and chunks", "[graphs][shard]") {
  const auto [kind, strategy, flat, travel] =
      GENERATE(Form{"gpt2", Shard::full, true}, Form{"llama", Shard::full, false}, Form{"llama", Shard::grad_op, true});
  const std::string schedule = GENERATE("1f1b", "zb-h1", "interleaved");
  CAPTURE(kind, to_string(strategy), schedule, flat);
  if (sg::testing::scale() > 1 && flat) return;
  const sg::Plan plan{
      .layout   = {.dp = 2, .pp = 2},
      .pipeline = {.schedule = schedule, .chunks = schedule == "interleaved" ? 2 : 1},
      .shard    = {.strategy = strategy, .reduce = ReduceWhen::each, .grad_slots = 1, .min_params = 50, .flat = flat}};
  check_near(sharded(kind, plan, 4), whole(kind, plan, 4));
}

TEST_CASE("in bf16, with one microbatch, reducing after each has the bits of reducing once",
          "[graphs][shard][precision]") {
  const auto [kind, strategy, flat, travel] =
      GENERATE(Form{"gpt2", Shard::grad_op, false}, Form{"llama", Shard::full, true, sg::DType::bf16});
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{.dp = 2}, sg::LayoutSpec{.dp = 2, .pp = 2});
  CAPTURE(kind, to_string(layout), to_string(strategy), travel);
  const sg::Plan plan{.layout    = layout,
                      .shard     = {.strategy = strategy, .reduce = ReduceWhen::each, .min_params = 50, .flat = flat},
                      .precision = {.param = sg::DType::bf16, .reduce = travel}};
  CHECK(sharded(kind, plan, 1) == whole(kind, plan, 1));
}

// Sums of gradients differ in their last bits. If gradients travel in bf16, the gradient of each microbatch is rounded.
// A weight is then sometimes rounded to the adjacent bf16 number. The weights of the first step are the same.
TEST_CASE("in bf16, reducing after each of several microbatches is close to reducing once",
          "[graphs][shard][precision]") {
  const auto [kind, strategy, flat, travel] =
      GENERATE(Form{"gpt2", Shard::grad_op, false}, Form{"llama", Shard::full, true, sg::DType::bf16});
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{.dp = 2}, sg::LayoutSpec{.dp = 2, .pp = 2});
  CAPTURE(kind, to_string(layout), travel);
  const sg::Plan plan{.layout    = layout,
                      .shard     = {.strategy = strategy, .reduce = ReduceWhen::each, .min_params = 50, .flat = flat},
                      .precision = {.param = sg::DType::bf16, .reduce = travel}};
  const History &expected = whole(kind, plan, 2), got = sharded(kind, plan, 2);
  CHECK(got.loss[0] == expected.loss[0]);
  CHECK(sg::testing::loss_distance(got, expected) < 1e-3);
  CHECK(sg::testing::norm_distance(got, expected) < (travel == sg::DType::f32 ? 1e-3 : 0x1p-7));
  CHECK(std::abs(got.grad_norm[0] / expected.grad_norm[0] - 1) < (travel == sg::DType::f32 ? 1e-6 : 0x1p-8));
}

TEST_CASE("keeping weights between microbatches works with every kind of prefetch", "[graphs][shard]") {
  const auto prefetch        = GENERATE(sg::Prefetch::backward_pre, sg::Prefetch::backward_post, sg::Prefetch::none);
  const bool forward         = GENERATE(true, false);
  const std::string schedule = GENERATE("1f1b", "interleaved");
  const auto reduce          = GENERATE(ReduceWhen::last, ReduceWhen::each);
  CAPTURE(to_string(prefetch), forward, schedule, to_string(reduce));
  if (!forward && (schedule != "interleaved" || reduce == ReduceWhen::each)) return;
  if (sg::testing::scale() > 1 && (forward == (schedule == "interleaved") || prefetch != sg::Prefetch::backward_post))
    return;
  const sg::Plan plan{.layout   = {.dp = 2, .pp = 2},
                      .pipeline = {.schedule = schedule, .chunks = schedule == "interleaved" ? 2 : 1},
                      .shard    = {.strategy                  = Shard::full,
                                   .reduce                    = reduce,
                                   .prefetch                  = prefetch,
                                   .forward_prefetch          = forward,
                                   .min_params                = 50,
                                   .keep_between_microbatches = true}};
  const History got = sharded("llama", plan, 4);
  if (reduce == ReduceWhen::last) {
    CHECK(got == whole("llama", plan, 4));
  } else {
    check_near(got, whole("llama", plan, 4));
  }
}
