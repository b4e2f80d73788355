// Updates that are applied some steps later: the bits of a sequential program that does the same.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "backends/loopback/world.hpp"
#include "graphs/models/model_folder.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/delayed_training.hpp"
#include "tests/support/training/golden.hpp"
#include "tests/support/training/short_training.hpp"
#include "tests/support/worlds/thread_processes.hpp"

namespace sg = stepgraph;
using sg::ReduceWhen;
using sg::Shard;
using sg::testing::delayed_reference;
using sg::testing::DelayedRun;
using sg::testing::run_trainer;
using sg::testing::small_gpt2;
using sg::testing::small_llama;

namespace {

constexpr sg::UpdatePlan stale(int steps) { return {.mode = sg::UpdateWhen::stale, .max_staleness = steps}; }

void fresh(sg::StepRun& run) { sg::set_fresh_weights(run, 7); }

DelayedRun run_of(const sg::Model& model, const sg::Plan& plan, const sg::BatchSpec& batch, int steps,
                  const sg::testing::TokensOfStep& tokens, const sg::testing::StartWeights& start = fresh) {
  sg::LoopbackWorld world(sg::Layout(plan.layout).num_ranks());
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 7});
  start(trainer.run());
  return run_trainer(trainer, 0, steps, tokens);
}

sg::BatchSpec batch_of(const sg::Plan& plan, int microbatches) {
  return {.global = plan.layout.dp * microbatches, .micro = 1, .seq = 8};
}

void check_same(const DelayedRun& found, const DelayedRun& expected) {
  CHECK(found.loss == expected.loss);
  CHECK(found.grad_norm == expected.grad_norm);
  CHECK(found.scale == expected.scale);
  CHECK(found.updates == expected.updates);
  CHECK((found.weights == expected.weights));
}

// Sanitized: two steps that apply gradients.
int steps_of(int late) { return sg::testing::sanitized() ? late + 2 : 5; }

// On synthetic tokens. Returns what the reference has done.
DelayedRun check_against_reference(const sg::Model& model, const sg::Plan& plan, const sg::BatchSpec& batch,
                                   int steps) {
  const auto tokens   = [&](int step) { return sg::testing::tokens_for(batch, step, model.vocab); };
  DelayedRun expected = delayed_reference(model, plan, batch, steps, tokens, fresh);
  check_same(run_of(model, plan, batch, steps, tokens), expected);
  return expected;
}

}  // namespace

TEST_CASE("stale updates of the golden model have the bits of a sequential program that delays them",
          "[graphs][stale]") {
  const sg::testing::Golden& golden = sg::testing::golden("gpt2-tiny");
  const sg::LayoutSpec layout       = GENERATE(sg::LayoutSpec{.dp = 2}, sg::LayoutSpec{.dp = 4},
                                               sg::LayoutSpec{.dp = 2, .tp = 2}, sg::LayoutSpec{.dp = 2, .pp = 2});
  const int late                    = GENERATE(0, 1, 3);
  CAPTURE(to_string(layout), late);
  static int seen = 0;
  if (sg::testing::left_out(seen, 7)) return;  // sanitized: no delay, and one with tp; other tests have the rest
  const int steps = sg::testing::runs_all() ? 20 : sg::testing::sanitized() ? late + 3 : 8;
  const sg::Plan plan{.layout = layout, .optimizer = golden.optimizer, .update = stale(late)};
  sg::BatchSpec batch = golden.batch;
  batch.micro         = 1;
  const auto tokens   = [&](int step) {
    const auto of = golden.tokens_of(step);
    return std::vector<std::int32_t>(of.begin(), of.end());
  };
  const auto start          = [&](sg::StepRun& run) { set_weights(run, sg::ModelFolder(golden.folder)); };
  const DelayedRun expected = delayed_reference(golden.model, plan, batch, steps, tokens, start);
  const DelayedRun found    = run_of(golden.model, plan, batch, steps, tokens, start);
  check_same(found, expected);
  CHECK(found.updates.back() == steps - late);
  if (late > 0) return;
  sg::Plan synchronous = plan;
  synchronous.update   = {};
  check_same(found, run_of(golden.model, synchronous, batch, steps, tokens, start));
}

TEST_CASE("stale updates have the same bits however weights are sharded", "[graphs][stale][shard]") {
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::grad_op, Shard::full, Shard::hybrid);
  const auto reduce    = GENERATE(ReduceWhen::last, ReduceWhen::each);
  const bool flat      = GENERATE(true, false);
  const auto layout =
      GENERATE(sg::LayoutSpec{.dp = 4}, sg::LayoutSpec{.dp = 2, .tp = 2}, sg::LayoutSpec{.dp = 2, .pp = 2});
  if (sg::testing::sanitized() && (!flat || layout.dp != 4)) return;
  CAPTURE(to_string(strategy), to_string(reduce), flat, to_string(layout));
  if (reduce == ReduceWhen::each && (strategy == Shard::none || strategy == Shard::zero1)) return;
  if (strategy == Shard::none && !flat) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 3)) return;
  const sg::Plan plan{.layout = layout,
                      .shard  = {.strategy   = strategy,
                                 .reduce     = reduce,
                                 .min_params = strategy == Shard::none ? 0 : 50,
                                 .flat       = flat,
                                 .group      = strategy == Shard::hybrid ? 2 : 0},
                      .update = stale(layout.dp == 4 ? 1 : 2)};
  check_against_reference(flat ? small_gpt2() : small_llama(), plan, batch_of(plan, 2),
                          steps_of(plan.update.max_staleness));
}

TEST_CASE("stale updates have the same bits with pipelines, recomputation, dropout and a rate schedule",
          "[graphs][stale]") {
  const std::string schedule = GENERATE("1f1b", "interleaved", "zb-h1");
  const auto recompute       = GENERATE(sg::Recompute::none, sg::Recompute::full);
  static int seen            = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(schedule, to_string(recompute));
  const sg::Plan plan{.layout    = {.dp = 2, .pp = 2},
                      .pipeline  = {.schedule = schedule, .chunks = schedule == "interleaved" ? 2 : 1},
                      .shard     = {.strategy = Shard::full, .min_params = 50, .keep_between_microbatches = true},
                      .optimizer = {.schedule = {.kind = sg::RateKind::cosine, .warmup = 2, .steps = 6}},
                      .update    = stale(1),
                      .recompute = recompute};
  check_against_reference(small_gpt2(0.1), plan, batch_of(plan, 4), steps_of(1));
}

TEST_CASE("stale updates have the same bits with any buckets and expanded collectives", "[graphs][stale]") {
  sg::Plan plan{.layout = {.dp = 4}, .update = stale(2)};
  const std::string what = GENERATE("small buckets", "one bucket", "no views", "sum", "ring", "tree", "one rank");
  static int seen        = 0;
  if (sg::testing::left_out(seen, 2)) return;
  CAPTURE(what);
  if (what == "small buckets") plan.shard.bucket_mb = 0.001;
  if (what == "one bucket") plan.shard.delay_all_reduce = true;
  if (what == "no views") plan.shard.bucket_views = false;
  if (what == "sum") plan.shard.reduction = sg::Reduction::sum;
  if (what == "ring") plan.algorithm = sg::Algorithm::ring;
  if (what == "tree") plan.algorithm = sg::Algorithm::tree;
  if (what == "one rank") plan.layout = {};
  check_against_reference(small_gpt2(), plan, batch_of(plan, 2), steps_of(2));
}

TEST_CASE("stale updates have the same bits in bf16, with gradients of any type", "[graphs][stale][precision]") {
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::full);
  const auto travel    = GENERATE(sg::DType::f32, sg::DType::bf16);
  const bool keep      = GENERATE(false, true);
  const int late       = GENERATE(1, 2);
  if (sg::testing::sanitized() && (late == 1 || keep)) return;
  CAPTURE(to_string(strategy), travel, keep, late);
  if (keep && travel == sg::DType::f32) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 5)) return;
  const sg::Plan plan{.layout    = {.dp = 2, .tp = 2},
                      .shard     = {.strategy = strategy, .min_params = strategy == Shard::none ? 0 : 50},
                      .precision = {.param = sg::DType::bf16, .reduce = travel, .keep_low_precision_grads = keep},
                      .update    = stale(late)};
  check_against_reference(small_llama(), plan, batch_of(plan, 2), steps_of(late));
}

TEST_CASE("a stale set of f16 gradients that overflowed is dropped when it would have been applied",
          "[graphs][stale][loss_scale]") {
  const sg::LayoutSpec layout = GENERATE(sg::LayoutSpec{}, sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2});
  const int late              = GENERATE(1, 3);
  static int seen             = 1;
  if (sg::testing::left_out(seen, 4)) return;  // sanitized: the last
  CAPTURE(to_string(layout), late);
  const sg::Plan plan{
      .layout    = layout,
      .precision = {.param      = sg::DType::f16,
                    .loss_scale = {.scaling = sg::Scaling::dynamic, .value = 0x1p24, .growth_steps = 2}},
      .optimizer = {.lr = 3e-3},
      .update    = stale(late)};
  const DelayedRun run = check_against_reference(small_gpt2(), plan, {.global = 8, .micro = 2, .seq = 16}, 14);
  // Empty sets neither shrink nor grow the scale.
  for (int step = 0; step <= late; ++step) CHECK(run.scale[static_cast<std::size_t>(step)] == 0x1p24);
  CHECK(run.updates.back() < 14 - late);
  CHECK(run.updates.back() > 3);
}

TEST_CASE("offload that moves other classes than gradients changes no bit of stale updates",
          "[graphs][stale][offload]") {
  sg::Plan plan{.layout = {.dp = 2}, .update = stale(1)};
  const sg::BatchSpec batch = batch_of(plan, 2);
  const auto tokens         = [&](int step) { return sg::testing::tokens_for(batch, step, 64); };
  const DelayedRun expected = run_of(small_gpt2(), plan, batch, 5, tokens);
  plan.offload              = GENERATE(sg::OffloadPlan{.params = true}, sg::OffloadPlan{.activations = true},
                                       sg::OffloadPlan{.optimizer = true, .overlap = false});
  CAPTURE(plan.offload.params, plan.offload.optimizer);
  check_same(run_of(small_gpt2(), plan, batch, 5, tokens), expected);
}

TEST_CASE("stale updates over processes have the bits of loopback", "[graphs][stale][processes][threads]") {
  const auto exchanges = GENERATE(sg::testing::Exchanges::hub, sg::testing::Exchanges::messages);
  const Shard strategy = GENERATE(Shard::none, Shard::full);
  static int seen      = 0;
  if (sg::testing::left_out(seen, 3)) return;
  const sg::Plan plan{.layout = {.dp = 2, .pp = 2},
                      .shard  = {.strategy = strategy, .min_params = strategy == Shard::none ? 0 : 50},
                      .update = stale(2)};
  const sg::BatchSpec batch = batch_of(plan, 2);
  const auto tokens         = [&](int step) { return sg::testing::tokens_for(batch, step, 64); };
  const DelayedRun expected = run_of(small_gpt2(), plan, batch, 5, tokens);
  std::vector<DelayedRun> found(4);
  sg::testing::in_processes(sg::testing::neighbours(4, 4), exchanges, [&](sg::World& world) {
    sg::Trainer trainer(small_gpt2(), plan, batch, world, {.threads = 1, .seed = 7});
    found[static_cast<std::size_t>(world.peers()->process())] = run_trainer(trainer, 0, 5, tokens);
  });
  check_same(found[0], expected);
  for (const DelayedRun& each : found) {
    CHECK(each.loss == expected.loss);
    CHECK(each.grad_norm == expected.grad_norm);
  }
}
