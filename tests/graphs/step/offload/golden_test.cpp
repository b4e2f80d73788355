// Golden models in fp32 with every combination of offloaded classes: the bits of runs without offload.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <string>
#include <vector>

#include "graphs/step/memory_requirement.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/golden.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;

namespace {

struct Setting {
  std::string name;
  sg::Plan plan;
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  all.push_back({"plain", {}});
  all.push_back({"zero1", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1}}});
  all.push_back({"full", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full}}});
  all.push_back({"tp 2", {.layout = {.tp = 2}}});
  all.push_back({"pp 2", {.layout = {.pp = 2}}});
  return all;
}

struct Count {
  int runs = 0, equal = 0;
};

// Trains with the classes in host memory, and on disk if `folder` is given.
void compare(const sg::testing::Golden& golden, const Setting& setting, const sg::testing::Trained& expected,
             int classes, const sg::testing::TempFolder* folder, int micro, int steps, Count& count) {
  sg::Plan plan = setting.plan;
  plan.offload  = sg::testing::offload_of(classes);
  if (folder != nullptr) {
    plan.offload.disk       = folder->path().string();
    plan.offload.host_bytes = 64 << 10;
  }
  CAPTURE(setting.name, classes, folder != nullptr);
  const auto trained = sg::testing::train(golden, plan, micro, steps);
  CHECK(trained.loss == expected.loss);
  CHECK(trained.grad_norm == expected.grad_norm);
  CHECK(trained.gradients == expected.gradients);
  ++count.runs;
  count.equal += trained.loss == expected.loss && trained.grad_norm == expected.grad_norm &&
                 trained.gradients == expected.gradients;
}

}  // namespace

TEST_CASE("golden models have the bits of no offload with each class and with all", "[graphs][offload][golden]") {
  const sg::testing::TempFolder folder;
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const auto& golden      = sg::testing::golden(model);
  CAPTURE(model);
  static int seen = 0, settings_seen = 0;
  Count count;
  for (const Setting& setting : settings()) {
    if (sg::testing::left_out(settings_seen, 2)) continue;  // each setting with one of the models
    const auto expected = sg::testing::train(golden, setting.plan, 2, 2);
    for (const int classes : {1, 2, 4, 8, 15}) {
      if (sg::testing::scale() > 1 && classes != 15) continue;
      if (classes != 15 && sg::testing::left_for_the_night(seen, 3)) continue;  // small models run with each class
      compare(golden, setting, expected, classes, nullptr, 2, 2, count);
      if (setting.name == "plain") compare(golden, setting, expected, classes, &folder, 2, 2, count);
    }
  }
  CHECK(count.equal == count.runs);
}

TEST_CASE("golden models have their bits with layers that are kept, recomputed and offloaded",
          "[graphs][offload][golden][layers]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const auto& golden      = sg::testing::golden(model);
  static int seen         = 0;
  for (const Setting& setting : settings()) {
    if (sg::testing::left_out(seen, 2)) continue;
    const auto expected  = sg::testing::train(golden, setting.plan, 2, 2);
    const auto device_of = [&](sg::Recompute kind) {
      sg::Plan plan   = setting.plan;
      plan.recompute  = kind;
      const auto rows = sg::memory_requirements(golden.model, plan,
                                                {.global = golden.batch.global, .micro = 2, .seq = golden.batch.seq},
                                                {.keep_gradients = true});
      return sg::largest(rows).peak_bytes;
    };
    const std::int64_t none = device_of(sg::Recompute::none), full = device_of(sg::Recompute::full);
    for (const bool may_offload : {false, true}) {
      sg::Plan plan            = setting.plan;
      plan.recompute           = sg::Recompute::automatic;
      plan.offload.activations = may_offload;
      plan.memory_limit_bytes  = std::max(none, full) - std::max<std::int64_t>(0, none - full) / 3;
      CAPTURE(model, setting.name, may_offload, none, full);
      const auto trained = sg::testing::train(golden, plan, 2, 2);
      CHECK(trained.loss == expected.loss);
      CHECK(trained.grad_norm == expected.grad_norm);
      CHECK(trained.gradients == expected.gradients);
    }
  }
}

TEST_CASE("golden models have the bits of no offload in every combination", "[.nightly][graphs][golden]") {
  const sg::testing::TempFolder folder;
  Count count;
  for (const char* model : {"gpt2-tiny", "llama-tiny"}) {
    CAPTURE(model);
    const auto& golden = sg::testing::golden(model);
    for (const Setting& setting : settings()) {
      const auto expected = sg::testing::train(golden, setting.plan, 1, 4);
      for (int classes = 0; classes < 16; ++classes) {
        compare(golden, setting, expected, classes, nullptr, 1, 4, count);
        if (classes > 0) compare(golden, setting, expected, classes, &folder, 1, 4, count);
      }
    }
  }
  WARN(count.equal << " of " << count.runs << " runs are equal");
  CHECK(count.equal == 2 * 5 * (16 + 15));
}
