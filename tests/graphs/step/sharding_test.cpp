// Sharding changes where data is stored, not the results.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <map>

#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/golden.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::Shard;
using sg::testing::golden;
using sg::testing::History;

namespace {

int num_steps() { return sg::testing::compared_steps(20); }

sg::Plan plan_of(sg::LayoutSpec layout, sg::ShardPlan shard) {
  shard.min_params = 100;
  return {.layout = layout, .shard = shard};
}

// The run without sharding. Cached, because several runs are compared with it.
const sg::testing::Trained& whole(const std::string& model, sg::Plan plan, int micro, int steps) {
  static std::map<std::string, sg::testing::Trained> runs;
  plan.shard            = {};
  const std::string key = sg::str(model, " ", plan.layout.dp, plan.layout.tp, plan.layout.pp,
                                  plan.layout.sequence_parallel, plan.pipeline.schedule, micro, " ", steps);
  const auto found      = runs.find(key);
  if (found != runs.end()) return found->second;
  return runs.emplace(key, sg::testing::train(golden(model), plan, micro, steps)).first->second;
}

// Compares losses, norms and the gradients of the first step with the run without sharding.
void check_same_bits(const std::string& model, const sg::Plan& plan, int micro, int steps) {
  const auto& expected = whole(model, plan, micro, steps);
  const auto got       = sg::testing::train(golden(model), plan, micro, steps);
  CHECK(got.loss == expected.loss);
  CHECK(got.grad_norm == expected.grad_norm);
  CHECK(got.gradients == expected.gradients);
  sg::testing::check_golden_bounds(golden(model), got, steps);
}

}  // namespace

TEST_CASE("every strategy that reduces once per step trains to the same bits", "[graphs][shard]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const Shard strategy    = GENERATE(Shard::zero1, Shard::grad_op, Shard::full);
  const bool flat         = GENERATE(true, false);
  const int dp            = GENERATE(2, 4, 8);
  CAPTURE(model, to_string(strategy), flat, dp);
  if (sg::testing::scale() > 1 && dp != 4) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 5)) return;
  check_same_bits(model, plan_of({.dp = dp}, {.strategy = strategy, .flat = flat}), 1, num_steps());
}

TEST_CASE("prefetch and slots change no bits", "[graphs][shard]") {
  const auto prefetch = GENERATE(sg::Prefetch::backward_pre, sg::Prefetch::backward_post, sg::Prefetch::none);
  const bool forward  = GENERATE(true, false);
  const int slots     = GENERATE(1, 2, 3, 4);
  CAPTURE(to_string(prefetch), forward, slots);
  if (!forward && slots != 3) return;
  if (sg::testing::scale() > 1 && slots > 2) return;
  check_same_bits(
      "gpt2-tiny",
      plan_of({.dp = 2}, {.strategy = Shard::full, .prefetch = prefetch, .forward_prefetch = forward, .slots = slots}),
      2, num_steps());
}

TEST_CASE("with one microbatch, reducing after each changes no bits", "[graphs][shard]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const Shard strategy    = GENERATE(Shard::grad_op, Shard::full);
  const bool flat         = GENERATE(true, false);
  const int grad_slots    = GENERATE(1, 2, 5);
  CAPTURE(model, to_string(strategy), flat, grad_slots);
  if (sg::testing::scale() > 1 && grad_slots != 2) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 3)) return;
  check_same_bits(
      model,
      plan_of({.dp = 2},
              {.strategy = strategy, .reduce = sg::ReduceWhen::each, .grad_slots = grad_slots, .flat = flat}),
      4, num_steps());
}

TEST_CASE("buckets of any size change no bits", "[graphs][shard]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const double bucket_mb = GENERATE(1e-6, 0.01, 25.0), first_bucket_mb = GENERATE(0.0, 0.003);
  const bool views = GENERATE(true, false), delay = GENERATE(true, false);
  if (delay && bucket_mb < 25) return;
  if (sg::testing::scale() > 1 && (first_bucket_mb > 0 || model == "gpt2-tiny")) return;
  CAPTURE(model, bucket_mb, first_bucket_mb, views, delay);
  check_same_bits(model,
                  {.layout = {.dp = 2},
                   .shard  = {.bucket_mb        = bucket_mb,
                              .first_bucket_mb  = first_bucket_mb,
                              .bucket_views     = views,
                              .delay_all_reduce = delay}},
                  2, sg::testing::cases(4));
}

TEST_CASE("sharding works with tensor and pipeline parallelism, schedules and recomputation", "[graphs][shard]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  struct Case {
    Shard strategy;
    bool flat, rows, keep;
    std::string schedule;
    sg::Recompute recompute;
  };
  using enum sg::Recompute;
  const Case test = GENERATE(
      Case{Shard::zero1, true, false, false, "1f1b", none}, Case{Shard::zero1, false, true, false, "gpipe", full},
      Case{Shard::grad_op, true, true, false, "zb-h1", none},
      Case{Shard::grad_op, false, false, false, "interleaved", none},
      Case{Shard::full, true, false, false, "1f1b", full}, Case{Shard::full, false, true, false, "1f1b", none},
      Case{Shard::full, true, true, false, "zb-h2", selective},
      Case{Shard::full, true, false, true, "interleaved", none}, Case{Shard::full, false, false, true, "1f1b", full},
      Case{Shard::full, true, true, false, "gpipe", none});
  CAPTURE(model, to_string(test.strategy), test.flat, test.schedule, to_string(test.recompute), test.rows, test.keep);
  if (sg::testing::scale() > 1 && (model == "gpt2-tiny" || test.flat == test.rows)) return;
  sg::Plan plan  = plan_of({.dp = 2, .tp = 2, .pp = 2, .sequence_parallel = test.rows},
                           {.strategy = test.strategy, .flat = test.flat, .keep_between_microbatches = test.keep});
  plan.pipeline  = {.schedule = test.schedule, .chunks = test.schedule == "interleaved" ? 2 : 1};
  plan.recompute = test.recompute;
  check_same_bits(model, plan, 1, num_steps());
}

TEST_CASE("units of any kind change no bits", "[graphs][shard]") {
  const std::string units = GENERATE("layer", "model", "params:20000", "type:layer");
  const bool reshard      = GENERATE(true, false);
  static int seen         = 0;
  if (sg::testing::left_out(seen, 3)) return;
  CAPTURE(units, reshard);
  check_same_bits("gpt2-tiny",
                  plan_of({.dp = 2}, {.strategy = Shard::full, .units = units, .reshard_after_forward = reshard}), 2,
                  4);
}

TEST_CASE("keeping weights in a smaller reshard group changes no bits", "[graphs][shard]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const bool flat         = GENERATE(true, false);
  const int micro         = GENERATE(1, 2);
  CAPTURE(model, flat, micro);
  if (sg::testing::scale() > 1 && model == "gpt2-tiny") return;
  check_same_bits(model, plan_of({.dp = 4}, {.strategy = Shard::full, .flat = flat, .reshard_group = 2}), micro, 3);
}

TEST_CASE("three ranks share weights that do not divide by three", "[graphs][shard]") {
  const Shard strategy  = GENERATE(Shard::zero1, Shard::grad_op, Shard::full);
  const bool flat       = GENERATE(true, false);
  const sg::Model model = GENERATE(sg::testing::small_gpt2(), sg::testing::small_llama());
  CAPTURE(to_string(strategy), flat, model.kind);
  if (sg::testing::scale() > 1 && model.kind == "gpt2") return;
  const sg::BatchSpec batch{.global = 6, .micro = 1, .seq = 16};
  const sg::Plan whole{.layout = {.dp = 3}};
  const int steps = num_steps();
  CHECK(sg::testing::train(model, plan_of({.dp = 3}, {.strategy = strategy, .flat = flat}), batch, steps) ==
        sg::testing::train(model, whole, batch, steps));
}

TEST_CASE("hybrid sharding and reducing after each microbatch agree with no sharding within 1e-6", "[graphs][shard]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const Shard strategy    = GENERATE(Shard::grad_op, Shard::full, Shard::hybrid);
  const auto reduce       = GENERATE(sg::ReduceWhen::last, sg::ReduceWhen::each);
  const bool flat         = GENERATE(true, false);
  CAPTURE(model, to_string(strategy), to_string(reduce), flat);
  if (sg::testing::scale() > 1 && strategy != Shard::hybrid) return;
  const sg::Plan plan = plan_of(
      {.dp = 4}, {.strategy = strategy, .reduce = reduce, .flat = flat, .group = strategy == Shard::hybrid ? 2 : 0});
  const int steps      = num_steps();
  const auto& expected = whole(model, {.layout = {.dp = 4}}, 1, steps);
  const auto got       = sg::testing::train(golden(model), plan, 1, steps);
  const History a{expected.loss, expected.grad_norm}, b{got.loss, got.grad_norm};
  CHECK(loss_distance(a, b) < 1e-6);
  CHECK(norm_distance(a, b) < 1e-6);
  sg::testing::check_golden_bounds(golden(model), got, steps);
}
