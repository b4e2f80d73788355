// Gradients that wait for their update: in checkpoints, and when the mode of updates changes between steps.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <filesystem>
#include <limits>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/train/checkpoint.hpp"
#include "graphs/train/data_parallel.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/checkpointed.hpp"
#include "tests/support/training/delayed_training.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::Shard;
using sg::testing::DelayedRun;
using sg::testing::run_trainer;
using sg::testing::small_gpt2;
using sg::testing::TempFolder;
using sg::testing::Training;

namespace {

constexpr sg::UpdatePlan stale(int steps) { return {.mode = sg::UpdateWhen::stale, .max_staleness = steps}; }

const sg::Model& model() {
  static const sg::Model made = small_gpt2();
  return made;
}

DelayedRun run_on(Training& training, int steps) {
  return run_trainer(training.trainer, static_cast<int>(training.trainer.num_steps()), steps,
                     [&](int step) { return sg::testing::tokens_for(training.spec, step, model().vocab); });
}

double loss_of(sg::Evaluator& evaluator, const sg::BatchSpec& batch) {
  return evaluator.loss(sg::testing::tokens_for(batch, 9, model().vocab));
}

}  // namespace

TEST_CASE("a stale run that is resumed has the bits of one that never stopped", "[graphs][stale][checkpoint]") {
  struct Case {
    const char* name;
    sg::Plan plan;
  };
  const auto each = GENERATE(
      Case{"dp", {.layout = {.dp = 2}, .update = stale(1)}},
      Case{"dp, 3 late", {.layout = {.dp = 2}, .update = stale(3)}}, Case{"one rank", {.update = stale(2)}},
      Case{"zero1",
           {.layout = {.dp = 2, .pp = 2}, .shard = {.strategy = Shard::zero1, .min_params = 50}, .update = stale(2)}},
      Case{"full", {.layout = {.dp = 4}, .shard = {.strategy = Shard::full, .min_params = 50}, .update = stale(2)}},
      Case{"bf16 kept",
           {.layout    = {.dp = 2},
            .precision = {.param = sg::DType::bf16, .reduce = sg::DType::bf16, .keep_low_precision_grads = true},
            .update    = stale(2)}},
      Case{"f16",
           {.layout    = {.dp = 2},
            .precision = {.param      = sg::DType::f16,
                          .loss_scale = {.scaling = sg::Scaling::dynamic, .value = 0x1p22, .growth_steps = 2}},
            .update    = stale(2)}});
  const int saved_after = GENERATE(0, 1, 4);  // some sets are empty, or none
  const bool async      = GENERATE(true, false);
  CAPTURE(each.name, saved_after, async);
  if (async && saved_after != 4) return;
  static int seen = 8;
  if (sg::testing::left_out(seen, 13)) return;  // sanitized: "dp, 3 late" after 1 step, "full" while steps go on
  const TempFolder folder(sg::testing::fast_folder());
  Training whole(model(), each.plan), first(model(), each.plan), second(model(), each.plan);
  run_on(whole, saved_after);
  run_on(first, saved_after);
  const std::string path = sg::testing::save_checkpoint(first.trainer, folder.path(), async);
  load_checkpoint(second.trainer, path);
  CHECK(second.trainer.num_updates() == whole.trainer.num_updates());
  const DelayedRun expected = run_on(whole, 4);
  CHECK((run_on(first, 4) == expected));  // saving has changed nothing
  CHECK((run_on(second, 4) == expected));
}

TEST_CASE("waiting gradients of a checkpoint fit only the same run, and are dropped by a synchronous one",
          "[graphs][stale][checkpoint][refuses]") {
  const sg::Plan plan{.layout = {.dp = 2}, .update = stale(2)};
  const TempFolder folder(sg::testing::fast_folder());
  Training saved(model(), plan);
  run_on(saved, 3);
  const std::string path = sg::testing::save_checkpoint(saved.trainer, folder.path());
  CHECK(sg::CheckpointReader(path).manifest().state.waiting->num_sets == 2);
  sg::CheckpointReader(path).check();
  const auto refused = [&](const sg::Plan& other, const std::string& text) {
    Training training(model(), other);
    CHECK_THROWS_MATCHES(load_checkpoint(training.trainer, path), sg::Error, MessageMatches(ContainsSubstring(text)));
  };
  refused(
      {.layout = {.dp = 2}, .update = stale(1)},
      "it has 2 sets of gradients that wait for their update, with update.max_staleness 2, not 1 (max_staleness 2, or "
      "update.mode synchronous, which drops them)");
  refused({.layout = {.dp = 4}, .update = stale(2)}, "; this run has layout pp1-dp4-tp1");
  refused({.layout = {.dp = 2}, .shard = {.strategy = Shard::zero1}, .update = stale(2)}, "shard zero1");
  // Synchronous, in any layout.
  Training dropped(model(), {.layout = {.tp = 2}});
  load_checkpoint(dropped.trainer, path);
  CHECK(dropped.trainer.num_updates() == 1);
  CHECK(dropped.weights() == saved.weights());
  run_on(dropped, 1);
  // And back: sets begin empty.
  const std::string back = sg::testing::save_checkpoint(dropped.trainer, folder / "back");
  CHECK_FALSE(sg::CheckpointReader(back).manifest().state.waiting);
  Training again(model(), plan);
  load_checkpoint(again.trainer, back);
  CHECK(again.trainer.run().num_waiting() == 0);
  CHECK(run_on(again, 3).updates == std::vector<std::int64_t>{2, 2, 3});
}

TEST_CASE("damaged waiting gradients are refused", "[graphs][stale][checkpoint][refuses]") {
  const sg::Plan plan{.update = stale(1)};
  const TempFolder folder(sg::testing::fast_folder());
  Training saved(model(), plan), other(model(), plan);
  run_on(saved, 2);
  const std::string path = sg::testing::save_checkpoint(saved.trainer, folder.path());
  std::int64_t offset    = 0;
  const sg::CheckpointReader reader(path);
  for (const sg::CheckpointPart& part : reader.manifest().files.front().parts)
    if (part.state == sg::StateKind::waiting && part.num_bytes() > 100) offset = part.offset;
  const std::filesystem::path file = std::filesystem::path(path) / sg::checkpoint_file_name(0);
  std::string bytes                = sg::testing::file_bytes(file);
  bytes[static_cast<std::size_t>(offset) + 50] ^= 1;
  sg::testing::write_file(file, bytes);
  CHECK_THROWS_MATCHES(
      load_checkpoint(other.trainer, path), sg::Error,
      MessageMatches(ContainsSubstring("in gradients that wait for their update, do not have their hash")));
}

TEST_CASE("the mode of updates can change between steps", "[graphs][stale]") {
  const Shard strategy = GENERATE(Shard::none, Shard::full);
  const auto precision =
      GENERATE(sg::PrecisionPlan{},
               sg::PrecisionPlan{.param      = sg::DType::f16,
                                 .loss_scale = {.scaling = sg::Scaling::dynamic, .value = 0x1p22, .growth_steps = 2}});
  static int seen = 1;
  if (sg::testing::left_out(seen, 4)) return;  // sanitized: the last
  CAPTURE(to_string(strategy), to_string(precision.param));
  const int steps = sg::testing::sanitized() ? 3 : 4;
  sg::Plan plan{.layout    = {.dp = 2},
                .shard     = {.strategy = strategy, .min_params = strategy == Shard::none ? 0 : 50},
                .precision = precision};
  const TempFolder folder(sg::testing::fast_folder());
  Training changed(model(), plan);
  sg::Evaluator evaluator(changed.trainer, changed.spec);
  sg::CheckpointWriter writer(changed.trainer, {.folder = folder / "writer", .keep = 0});
  run_on(changed, 3);
  static_cast<void>(loss_of(evaluator, changed.spec));
  for (const auto& [update, dropped] :
       {std::pair(stale(2), 0), std::pair(stale(1), 2), std::pair(sg::UpdatePlan{}, 1), std::pair(stale(0), 0)}) {
    CAPTURE(to_string(update.mode), update.max_staleness);
    const double loss      = loss_of(evaluator, changed.spec);
    const std::string path = sg::testing::save_checkpoint(changed.trainer, folder / "oracle");
    CHECK(changed.trainer.set_update_mode(update) == dropped);
    CHECK(changed.trainer.plan().update == update);
    CHECK(changed.trainer.set_update_mode(update) == 0);
    CHECK(loss_of(evaluator, changed.spec) == loss);
    // A checkpoint has the weights, optimizer states and counters, and a synchronous run drops waiting gradients.
    Training other(model(), plan);
    load_checkpoint(other.trainer, path);
    other.trainer.set_update_mode(update);
    CHECK((run_on(changed, steps) == run_on(other, steps)));
    sg::Evaluator fresh(changed.trainer, changed.spec);
    CHECK(loss_of(evaluator, changed.spec) == loss_of(fresh, changed.spec));
    writer.save(0);
    Training loaded(model(), plan);
    loaded.trainer.set_update_mode(update);
    load_checkpoint(loaded.trainer, writer.finish().value());
    CHECK(loaded.weights() == changed.weights());
    CHECK(loaded.trainer.run().num_waiting() == update.max_staleness);
  }
}

TEST_CASE("a mode of updates that is refused leaves the trainer as it was", "[graphs][stale][refuses]") {
  const sg::Plan plan{.layout = {.dp = 2}};
  Training expected(model(), plan);
  sg::LoopbackWorld world(2);
  sg::Trainer trainer(model(), plan, expected.spec, world, {.threads = 2, .keep_gradients = true, .seed = 7});
  const auto tokens = [&](int step) { return sg::testing::tokens_for(expected.spec, step, model().vocab); };
  static_cast<void>(run_trainer(trainer, 0, 2, tokens));
  CHECK_THROWS_MATCHES(trainer.set_update_mode(stale(1)), sg::Error,
                       MessageMatches(ContainsSubstring("keeps no gradients")));
  CHECK_THROWS_MATCHES(trainer.set_update_mode(stale(-1)), sg::Error,
                       MessageMatches(ContainsSubstring("max_staleness: -1")));
  run_on(expected, 2);
  CHECK((run_trainer(trainer, 2, 2, tokens) == run_on(expected, 2)));
}

TEST_CASE("the norm of the last step can be asked for at any time and changes nothing", "[graphs][stale]") {
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::full);
  const sg::Plan plan{.layout = {.dp = 2, .pp = 2},
                      .shard  = {.strategy = strategy, .min_params = strategy == Shard::none ? 0 : 50},
                      .update = stale(1)};
  Training asked(model(), plan), plain(model(), plan);
  const DelayedRun expected = run_on(plain, 4);
  CHECK(std::isnan(asked.trainer.last_grad_norm()));
  for (std::size_t step = 0; step < 4; ++step) {
    const DelayedRun one = run_on(asked, 1);
    CHECK(one.grad_norm.front() == expected.grad_norm[step]);
    CHECK(asked.trainer.last_grad_norm() == expected.grad_norm[step]);
    CHECK(one.loss.front() == expected.loss[step]);
  }
  CHECK(asked.weights() == plain.weights());
}

TEST_CASE("a stale set whose norm is not finite is not applied", "[graphs][stale]") {
  Training training(model(), {.layout = {.dp = 2}, .update = stale(1)});
  std::vector<std::int64_t> updates;
  for (int step = 0; step < 5; ++step) {
    if (step == 1) training.trainer.set_rate(std::numeric_limits<double>::infinity());  // spoils all weights
    const DelayedRun one = run_on(training, 1);
    updates.push_back(one.updates.front());
    CHECK((one.grad_norm.front() == -1) == (step > 1));
  }
  CHECK(updates == std::vector<std::int64_t>{0, 1, 2, 2, 2});
}

TEST_CASE("weights that are set drop the gradients that wait", "[graphs][stale]") {
  Training training(model(), {.layout = {.dp = 2}, .update = stale(2)});
  run_on(training, 3);
  CHECK(training.trainer.run().num_waiting() == 2);
  set_fresh_weights(training.trainer.run(), 3);
  CHECK(training.trainer.run().num_waiting() == 0);
  CHECK(run_on(training, 3).updates == std::vector<std::int64_t>{1, 1, 2});
}

TEST_CASE("stale updates of DataParallel have the bits of a trainer", "[graphs][stale][data_parallel]") {
  const int late = GENERATE(1, 2);
  if (sg::testing::sanitized() && late == 1) return;
  const sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};
  const auto tokens = [&](int step) { return sg::testing::tokens_for(batch, step, model().vocab); };
  const sg::OptimizerPlan optimizer{.lr = 3e-3};
  sg::LoopbackWorld world(4), devices(4);
  sg::Trainer trainer(model(), {.layout = {.dp = 4}, .optimizer = optimizer}, batch, world, {.threads = 2, .seed = 7});
  sg::DataParallel parallel(
      model(), {.global = 8, .seq = 16, .micro = 2, .optimizer = optimizer, .threads = 2, .seed = 7}, devices);
  const auto check = [&](int first, int steps) {
    for (int step = first; step < first + steps; ++step) {
      CAPTURE(step);
      CHECK(parallel.step(tokens(step)).loss == trainer.step(tokens(step)).loss);
    }
  };
  check(0, 2);
  CHECK(parallel.set_update_mode(stale(late)) == 0);
  CHECK(trainer.set_update_mode(stale(late)) == 0);
  check(2, 5);
  CHECK(parallel.step(tokens(7)).gradients.empty());
  trainer.step(tokens(7));
  static_cast<void>(parallel.forward(std::vector<std::int32_t>(8 * 16, 1)));
  CHECK(parallel.set_update_mode({}) == late);
  CHECK(trainer.set_update_mode({}) == late);
  check(8, 3);
  CHECK_FALSE(parallel.step(tokens(11)).gradients.empty());
  sg::LoopbackWorld alone(2);
  CHECK_THROWS_MATCHES(sg::DataParallel(model(), {.global = 8, .seq = 16, .update = stale(1)}, alone), sg::Error,
                       MessageMatches(ContainsSubstring("without an optimizer")));
}
