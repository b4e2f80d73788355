// Checkpoints, evaluation, broadcasts and updates that come first, with weights and states that are offloaded.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <memory>
#include <string>
#include <vector>

#include "backends/loopback/world.hpp"
#include "backends/storage/spill_file.hpp"
#include "engine/base/error.hpp"
#include "graphs/train/broadcast_weights.hpp"
#include "graphs/train/checkpoint.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/checkpointed.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::small_gpt2;
using sg::testing::tokens_for;

namespace {

const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};

// Where offloaded tensors lie.
struct Where {
  std::string name;
  sg::OffloadPlan offload = {};
  bool on_disk            = false;
};

// Sanitized: without places whose code the others have too.
std::vector<Where> places() {
  std::vector<Where> all;
  all.push_back({"device"});
  all.push_back({"host", {.params = true, .grads = true, .optimizer = true, .activations = true}});
  if (!sg::testing::sanitized()) all.push_back({"optimizer on the host", {.optimizer = true}});
  all.push_back({"disk", {.params = true, .grads = true, .optimizer = true, .host_bytes = 64 << 10}, true});
  if (sg::is_built(sg::Compression::lossless)) {
    if (!sg::testing::sanitized())
      all.push_back({"lossless", {.params = true, .optimizer = true, .compress = sg::Compression::lossless}});
    all.push_back({"lossless on disk",
                   {.params = true, .optimizer = true, .host_bytes = 64 << 10, .compress = sg::Compression::lossless},
                   true});
  }
  return all;
}

std::vector<sg::Plan> plans() {
  return {{},
          {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1}, .precision = {.param = sg::DType::bf16}},
          {.layout = {.dp = 2, .pp = 2}, .shard = {.strategy = sg::Shard::full}}};
}

// A trainer with its world and its disk.
struct Run {
  sg::testing::TempFolder folder;
  sg::LoopbackWorld world;
  sg::Model model = small_gpt2();
  std::unique_ptr<sg::Trainer> trainer;

  explicit Run(sg::Plan plan, const Where& where, bool update_first = false)
      : folder(sg::testing::fast_folder()), world(plan.layout) {
    plan.offload = where.offload;
    sg::TrainerOptions options{.threads = 2, .seed = 7, .update_first = update_first};
    if (where.on_disk) {
      plan.offload.disk = folder.path().string();
      options.storage   = sg::spill_files(plan.offload.disk);
    }
    trainer = std::make_unique<sg::Trainer>(model, plan, batch, world, options);
  }

  std::vector<double> train(int end) const {
    std::vector<double> losses;
    while (trainer->num_steps() < end) {
      losses.push_back(trainer->step(tokens_for(batch, static_cast<int>(trainer->num_steps()), model.vocab)).loss);
    }
    return losses;
  }
  [[nodiscard]] std::uint64_t weights() const { return sg::testing::hash_weights(trainer->run()); }
};

}  // namespace

TEST_CASE("checkpoints resume into and out of offload to the bit", "[graphs][train][offload][checkpoint]") {
  const sg::Plan plan = GENERATE(from_range(plans()));
  static int seen     = 1;
  if (sg::testing::left_out(seen, 2)) return;  // sanitized: the second; two other tests have the first and the third
  CAPTURE(plan.layout.dp, plan.layout.pp);
  Run without(plan, {"device"});
  without.train(2);
  const std::vector<double> expected = without.train(4);
  const std::uint64_t weights        = without.weights();
  for (const Where& first : places()) {
    const sg::testing::TempFolder folder(sg::testing::fast_folder());
    Run saves(plan, first);
    saves.train(2);
    const std::string path = sg::testing::save_checkpoint(*saves.trainer, folder.path());
    for (const Where& second : places()) {
      if (first.name != "device" && second.name != "device" && first.name != second.name) continue;
      CAPTURE(first.name, second.name);
      Run resumes(plan, second);
      load_checkpoint(*resumes.trainer, path);
      CHECK(resumes.train(4) == expected);
      CHECK(resumes.weights() == weights);
    }
    CHECK(saves.train(4) == expected);
    if (sg::testing::scale() > 1) break;
  }
}

TEST_CASE("an evaluator reads offloaded weights in place", "[graphs][train][offload]") {
  const sg::Plan plan = GENERATE(from_range(plans()));
  static int seen     = 1;
  if (sg::testing::left_out(seen, 3)) return;
  const sg::BatchSpec other{.global = 8, .micro = 2, .seq = 4};
  Run without(plan, {"device"});
  sg::Evaluator expected(*without.trainer, other);
  const auto tokens = tokens_for(other, 9, without.model.vocab);
  const int steps   = sg::testing::sanitized() ? 2 : 3;
  std::vector<double> losses;
  for (int step = 1; step <= steps; ++step) {
    without.train(step);
    losses.push_back(expected.loss(tokens));
  }
  for (const Where& where : places()) {
    CAPTURE(plan.layout.dp, plan.layout.pp, where.name);
    Run run(plan, where);
    sg::Evaluator evaluator(*run.trainer, other);
    for (int step = 1; step <= steps; ++step) {
      run.train(step);
      CHECK(evaluator.loss(tokens) == losses[static_cast<std::size_t>(step) - 1]);
    }
    CHECK(run.weights() == without.weights());
  }
}

TEST_CASE("an evaluator finds weights where the trainer has them, with any budget", "[graphs][train][offload][disk]") {
  const sg::BatchSpec other{.global = 8, .micro = 2, .seq = 4};
  const int classes = GENERATE(9, 13);
  const int times   = sg::testing::sanitized() ? 5 : 1;
  for (int kib = 64; kib <= 400; kib += times * (kib < 200 || kib > 300 ? 40 : 8)) {
    Where where{"disk", sg::testing::offload_of(classes), true};
    where.offload.host_bytes = std::int64_t{kib} << 10;
    CAPTURE(classes, where.offload.host_bytes);
    Run run({}, where);
    CHECK_NOTHROW(sg::Evaluator(*run.trainer, other));
  }
}

TEST_CASE("offloaded weights are broadcast and compared", "[graphs][train][offload]") {
  for (const Where& where : places()) {
    CAPTURE(where.name);
    Run run({.layout = {.dp = 2}}, where);
    run.train(1);
    sg::StepRun& step           = run.trainer->run();
    const std::uint64_t hash    = check_weights(step);
    const sg::StoredRange& mine = step.step().ranks[1].weights.front().first;
    float value                 = 0;
    step.values().read(mine.buffer, std::span(&value, 1), mine.offset);
    const float other = value + 1;
    step.values().write(mine.buffer, std::span(&other, 1), mine.offset);
    step.values().flush();
    CHECK_THROWS_MATCHES(check_weights(step), sg::Error,
                         MessageMatches(ContainsSubstring("wte") && ContainsSubstring("rank 1 has hash")));
    CHECK(broadcast_weights(step) == hash);
    CHECK(check_weights(step) == hash);
  }
}

TEST_CASE("updates that come first have the bits of no offload", "[graphs][train][offload]") {
  const sg::Plan plan = GENERATE(from_range(plans()));
  static int seen     = 0;
  if (sg::testing::left_out(seen, 3)) return;
  const int steps = sg::testing::sanitized() ? 3 : 4;
  Run without(plan, {"device"});
  const std::vector<double> expected = without.train(steps);
  const std::uint64_t weights        = without.weights();
  for (const Where& where : places()) {
    CAPTURE(plan.layout.dp, plan.layout.pp, where.name);
    Run run(plan, where, true);
    CHECK(run.train(steps) == expected);
    CHECK(run.weights() == weights);
  }
}

TEST_CASE("evaluations and checkpoints change no bit with lossy moments", "[graphs][train][offload][checkpoint]") {
  const auto param        = GENERATE(sg::DType::f32, sg::DType::bf16);
  const auto kind         = GENERATE(sg::Compression::bf16, sg::Compression::dynamic8);
  const bool update_first = GENERATE(false, true);
  static int seen         = 0;
  if (sg::testing::left_out(seen, 7)) return;
  CAPTURE(to_string(param), to_string(kind), update_first);
  const sg::Plan plan{.precision = {.param = param}};
  const Where lossy{"lossy", {.optimizer = true, .compress = kind}};
  const Run alone(plan, lossy, update_first);
  const std::vector<double> expected = alone.train(5);
  const std::uint64_t weights        = alone.weights();
  const Run evaluated(plan, lossy, update_first);
  sg::Evaluator evaluator(*evaluated.trainer, batch);
  const sg::testing::TempFolder folder(sg::testing::fast_folder());
  std::vector<double> losses;
  for (int step = 1; step <= 5; ++step) {
    losses.push_back(evaluated.train(step).front());
    evaluator.loss(tokens_for(batch, 9, evaluated.model.vocab));
    const std::string path = sg::testing::save_checkpoint(*evaluated.trainer, folder.path());
    if (step != 3) continue;
    const Run resumed(plan, lossy, update_first);
    load_checkpoint(*resumed.trainer, path);
    CHECK(resumed.train(5) == std::vector<double>(expected.begin() + 3, expected.end()));
    CHECK(resumed.weights() == weights);
  }
  CHECK(losses == expected);
  CHECK(evaluated.weights() == weights);
}

TEST_CASE("tensors of compressed homes are read and written in pieces", "[graphs][train][offload]") {
  const auto kind =
      GENERATE(sg::Compression::fp16, sg::Compression::int8, sg::Compression::dynamic8, sg::Compression::lossless);
  if (!sg::is_built(kind)) SKIP("this build has no lz4");
  Run run({}, {"compressed", {.optimizer = true, .compress = kind}});
  sg::StepRun& step           = run.trainer->run();
  const sg::StoredRange& part = step.step().ranks.front().weights.front().first;
  std::vector<float> values(static_cast<std::size_t>(part.size()));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 2);  // exact in every kind
  const std::span<const float> all(values);
  for (std::size_t at = 0; at < values.size(); at += 100) {
    const auto piece = all.subspan(at, std::min<std::size_t>(100, values.size() - at));
    step.values().write(part.buffer, piece, part.offset + static_cast<std::int64_t>(at));
  }
  step.values().flush();
  std::vector<float> read(values.size());
  step.values().read(part.buffer, std::span(read), part.offset);
  CHECK(read == values);
  std::vector<float> few(3);
  step.values().read(part.buffer, std::span(few), part.offset + 501);
  CHECK(few == std::vector<float>{1, 0, 1});
}
