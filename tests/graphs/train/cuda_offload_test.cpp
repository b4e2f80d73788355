// Offload on a GPU: tensors in pinned memory and on disk, with copies on streams and updates on the host.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <cmath>
#include <string>
#include <vector>

#include "backends/storage/spill_file.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/device_case.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/short_training.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using sg::testing::tokens_for;

namespace {

struct Seen {
  std::vector<double> losses, norms;
  std::uint64_t weights                            = 0;
  friend bool operator==(const Seen&, const Seen&) = default;
};

Seen train(sg::Plan plan, bool capture, bool update_first, bool on_disk = false) {
  const sg::testing::TempFolder folder;
  const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 16};
  const sg::Model model = sg::testing::small_gpt2();
  const auto world      = sg::testing::device_world(sg::Layout(plan.layout).num_ranks(), capture);
  sg::TrainerOptions options{.threads = 2, .seed = 7, .update_first = update_first};
  if (on_disk) {
    plan.offload.disk       = folder.path().string();
    plan.offload.host_bytes = 64 << 10;
    options.storage         = sg::spill_files(plan.offload.disk);
  }
  sg::Trainer trainer(model, plan, batch, *world, options);
  sg::Evaluator evaluator(trainer, batch);
  Seen seen;
  for (int step = 0; step < 5; ++step) {
    const sg::StepResult result = trainer.step(tokens_for(batch, step, model.vocab));
    seen.losses.push_back(result.loss);
    seen.norms.push_back(result.grad_norm);
    if (step == 3) seen.losses.push_back(evaluator.loss(tokens_for(batch, 9, model.vocab)));
  }
  seen.weights = sg::testing::hash_weights(trainer.run());
  return seen;
}

// Each bit of `classes` is a class: params, grads, optimizer, activations.
sg::OffloadPlan offload_of(int classes) {
  return {.params      = (classes & 1) != 0,
          .grads       = (classes & 2) != 0,
          .optimizer   = (classes & 4) != 0,
          .activations = (classes & 8) != 0};
}

}  // namespace

TEST_CASE("on a GPU every combination of offloaded classes has the bits of no offload", "[graphs][cuda][offload]") {
  sg::testing::need_device();
  const auto type = GENERATE(sg::DType::f32, sg::DType::bf16);
  for (const bool capture : {false, true}) {
    sg::Plan plan{.precision = {.param = type}};
    const Seen expected = train(plan, capture, false);
    for (int classes = 1; classes < 16; ++classes) {
      if (sg::testing::sanitized() && classes != 15) continue;
      CAPTURE(type, capture, classes);
      plan.offload = offload_of(classes);
      CHECK(train(plan, capture, false) == expected);
      if (classes == 4 || classes == 15) CHECK(train(plan, capture, true) == expected);
    }
  }
}

TEST_CASE("on a GPU offload of several ranks has the bits of no offload", "[graphs][cuda][offload]") {
  sg::testing::need_device();
  std::vector<sg::Plan> plans{{.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1, .min_params = 50}},
                              {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full, .min_params = 50}},
                              {.layout = {.tp = 2}},
                              {.layout = {.pp = 2}}};
  for (sg::Plan& plan : plans) {
    const Seen expected = train(plan, true, false);
    for (const int classes : {4, 5, 15}) {
      CAPTURE(plan.layout.dp, plan.layout.tp, plan.layout.pp, classes);
      plan.offload = offload_of(classes);
      CHECK(train(plan, true, false) == expected);
    }
    if (sg::testing::sanitized()) return;
  }
}

TEST_CASE("on a GPU tensors on disk and compressed tensors train", "[graphs][cuda][offload][disk]") {
  sg::testing::need_device();
  sg::Plan plan;
  const Seen expected = train(plan, true, false);
  plan.offload        = offload_of(15);
  CHECK(train(plan, true, false, true) == expected);
  if (sg::is_built(sg::Compression::lossless)) {
    plan.offload.compress = sg::Compression::lossless;
    CHECK(train(plan, true, false) == expected);
    CHECK(train(plan, true, false, true) == expected);
  }
  plan.offload          = offload_of(10);
  plan.offload.compress = sg::Compression::int8;
  const Seen lossy      = train(plan, true, false);
  for (std::size_t i = 0; i < expected.losses.size(); ++i)
    CHECK(std::abs(lossy.losses[i] - expected.losses[i]) < 0.05 * expected.losses[i]);
}
