// Offload changes no bit: losses, norms and weights are those of a run without it.
#include <bit>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <set>
#include <string>
#include <vector>

#include "backends/loopback/world.hpp"
#include "backends/storage/spill_file.hpp"
#include "engine/plan/memory_plan.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::History;
using sg::testing::offload_of;
using sg::testing::small_gpt2;
using sg::testing::small_llama;

namespace {

constexpr int steps = 3;

struct Setting {
  std::string name;
  sg::Plan plan;
  sg::BatchSpec batch = {.global = 4, .micro = 1, .seq = 8};
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  all.push_back({"one rank", {}});
  all.push_back({"one microbatch", {}, {.global = 2, .micro = 2, .seq = 8}});
  all.push_back({"dp 2", {.layout = {.dp = 2}, .shard = {.bucket_mb = 0.01}}});
  all.push_back({"zero1", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1}}});
  all.push_back({"grad_op", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::grad_op}}});
  all.push_back({"full", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full}}});
  all.push_back({"full, reduced each",
                 {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full, .reduce = sg::ReduceWhen::each}}});
  all.push_back({"tp 2", {.layout = {.tp = 2}}});
  all.push_back({"pp 2", {.layout = {.pp = 2}}});
  all.push_back({"zero bubble", {.layout = {.pp = 2}, .pipeline = {.schedule = "zb-h1"}}});
  all.push_back({"recompute", {.recompute = sg::Recompute::full}});
  all.push_back({"bf16", {.precision = {.param = sg::DType::bf16}}});
  all.push_back(
      {"bf16 and zero1",
       {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1}, .precision = {.param = sg::DType::bf16}}});
  all.push_back({"sgd", {.optimizer = {.kind = sg::OptimizerKind::sgd}}});
  all.push_back({"no clipping", {.optimizer = {.clip = 0}}});
  if (!sg::testing::sanitized()) return all;
  std::erase_if(all, [](const Setting& setting) {
    static const std::set<std::string> few{"one rank", "full, reduced each", "tp 2", "zero bubble", "bf16 and zero1"};
    return !few.contains(setting.name);
  });
  return all;
}

// A run whose disk is a temporary folder.
History train(const sg::Model& model, sg::Plan plan, const sg::BatchSpec& batch, const sg::OffloadPlan& offload,
              const sg::testing::TempFolder* folder = nullptr) {
  plan.offload = offload;
  sg::TrainerOptions options{.threads = 2, .seed = 7};
  if (folder != nullptr) {
    plan.offload.disk = folder->path().string();
    options.storage   = sg::spill_files(plan.offload.disk);
  }
  return sg::testing::train(model, plan, batch, steps, options);
}

// Each setting is trained once without offload.
const History& without_offload(const Setting& setting) {
  static std::map<std::string, History> known;
  const auto found = known.find(setting.name);
  if (found != known.end()) return found->second;
  return known.emplace(setting.name, train(small_gpt2(), setting.plan, setting.batch, {})).first->second;
}

}  // namespace

TEST_CASE("every combination of offloaded classes has the bits of no offload", "[graphs][offload]") {
  const int classes = GENERATE(range(1, 16));
  CAPTURE(classes);
  if (sg::testing::sanitized() && classes != 15 && classes != 5) return;
  static int seen = 0;
  for (const Setting& setting : settings()) {
    const bool some = classes != 15 && !std::has_single_bit(static_cast<unsigned>(classes));  // not one, not all
    if (some && !sg::testing::sanitized() && sg::testing::left_for_the_night(seen, 4)) continue;
    CAPTURE(setting.name);
    CHECK(train(small_gpt2(), setting.plan, setting.batch, offload_of(classes)) == without_offload(setting));
  }
}

TEST_CASE("slots and the lanes of transfers change no bit", "[graphs][offload]") {
  for (const Setting& setting : settings()) {
    for (const int slots : {1, 3}) {
      for (const bool async : {true, false}) {
        CAPTURE(setting.name, slots, async);
        sg::OffloadPlan offload = offload_of(15);
        offload.slots           = slots;
        offload.async           = async;
        CHECK(train(small_gpt2(), setting.plan, setting.batch, offload) == without_offload(setting));
      }
      if (sg::testing::sanitized()) break;
    }
  }
}

TEST_CASE("a disk with little host memory changes no bit", "[graphs][offload][disk]") {
  const sg::testing::TempFolder folder;
  const int classes = GENERATE(15, 1, 2, 4, 8);
  if (sg::testing::sanitized() && classes != 15) return;
  static int seen = 0;
  for (const Setting& setting : settings()) {
    if (classes != 15 && sg::testing::left_for_the_night(seen, 4)) continue;  // all classes run in every setting
    for (const std::int64_t host_bytes : {std::int64_t{64} << 10, std::int64_t{300} << 10}) {
      const bool tight = host_bytes == std::int64_t{64} << 10;  // many pieces, so many nodes
      if (tight ? sg::testing::sanitized() : classes != 15) continue;
      CAPTURE(classes, setting.name, host_bytes);
      sg::OffloadPlan offload = offload_of(classes);
      offload.host_bytes      = host_bytes;
      CHECK(train(small_gpt2(), setting.plan, setting.batch, offload, &folder) == without_offload(setting));
    }
  }
}

TEST_CASE("lossless compression changes no bit", "[graphs][offload]") {
  const sg::testing::TempFolder folder;
  if (!sg::is_built(sg::Compression::lossless)) SKIP("this build has no lz4");
  const bool on_disk = GENERATE(false, true);
  const int classes  = GENERATE(5, 15);
  if (on_disk && classes != 15) return;
  static int seen = 0;
  for (const Setting& setting : settings()) {
    if ((classes != 15 || on_disk) && sg::testing::left_for_the_night(seen, 4)) continue;
    CAPTURE(classes, on_disk, setting.name);
    sg::OffloadPlan offload = offload_of(classes);
    offload.compress        = sg::Compression::lossless;
    if (on_disk) offload.host_bytes = std::int64_t{64} << 10;
    CHECK(train(small_gpt2(), setting.plan, setting.batch, offload, on_disk ? &folder : nullptr) ==
          without_offload(setting));
    if (sg::testing::sanitized()) break;
  }
}

TEST_CASE("tied weights of one rank and of two have the bits of no offload", "[graphs][offload]") {
  const sg::BatchSpec batch{.global = 2, .micro = 1, .seq = 8};
  for (const int pp : {1, 2}) {
    const sg::Plan plan{.layout = {.pp = pp}};
    const History expected = train(small_llama(), plan, batch, {});
    for (const int classes : {1, 3, 5, 15}) {
      CAPTURE(pp, classes);
      CHECK(train(small_llama(), plan, batch, offload_of(classes)) == expected);
    }
  }
}

TEST_CASE("skipped steps of fp16 are those of no offload", "[graphs][offload]") {
  sg::Plan plan{.precision = {.param = sg::DType::f16}};
  plan.precision.loss_scale.value        = 0x1p26;
  plan.precision.loss_scale.growth_steps = 2;
  const sg::BatchSpec batch{.global = 4, .micro = 2, .seq = 8};
  const auto expected = sg::testing::train_scaled(small_gpt2(), plan, batch, 12);
  CHECK(std::ranges::count(expected.skipped, true) > 0);
  CHECK(std::ranges::count(expected.skipped, false) > 0);
  for (const int classes : {1, 2, 4, 8, 15}) {
    CAPTURE(classes);
    plan.offload = offload_of(classes);
    CHECK(sg::testing::train_scaled(small_gpt2(), plan, batch, 12) == expected);
  }
}

TEST_CASE("lossy compression trains with losses near those without it", "[graphs][offload]") {
  const sg::testing::TempFolder folder;
  const auto kind =
      GENERATE(sg::Compression::fp16, sg::Compression::bf16, sg::Compression::int8, sg::Compression::dynamic8);
  const bool on_disk = GENERATE(false, true);
  if (sg::testing::sanitized() && on_disk != (kind == sg::Compression::fp16 || kind == sg::Compression::int8)) return;
  CAPTURE(to_string(kind), on_disk);
  // int8 is not fit for second moments: small ones become 0.
  sg::Plan plan{.layout = {.dp = 2}, .offload = offload_of(kind == sg::Compression::int8 ? 10 : 14)};
  const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};
  plan.offload.compress = kind;
  sg::TrainerOptions options{.threads = 2, .seed = 7};
  if (on_disk) {
    plan.offload.host_bytes = std::int64_t{64} << 10;
    plan.offload.disk       = folder.path().string();
    options.storage         = sg::spill_files(plan.offload.disk);
  }
  const History trained = sg::testing::train(small_gpt2(), plan, batch, 5, options);  // checks equal copies too
  plan.offload          = {};
  CHECK(loss_distance(trained, sg::testing::train(small_gpt2(), plan, batch, 5)) < 0.05);
}

TEST_CASE("lossy compression leaves masters as they are", "[graphs][offload]") {
  const auto kind  = GENERATE(sg::Compression::bf16, sg::Compression::dynamic8);
  const auto param = GENERATE(sg::DType::bf16, sg::DType::f16);
  CAPTURE(to_string(kind), to_string(param));
  const sg::BatchSpec batch{.global = 4, .micro = 2, .seq = 8};
  sg::Plan plan{.precision = {.param = param}, .optimizer = {.lr = 2e-4}};
  const auto train       = [&] { return sg::testing::train(small_gpt2(), plan, batch, 20); };
  const History expected = train();
  plan.offload           = offload_of(4);
  plan.offload.compress  = kind;
  CHECK(loss_distance(train(), expected) < 0.01);
  const sg::StepGraph step = sg::training_step(small_gpt2(), plan, batch);
  int masters = 0, packed = 0;
  for (const sg::HomeFormat& home : step.homes) {
    const bool is_master = std::ranges::any_of(step.ranks.front().weights, [&](const sg::StepWeight& weight) {
      return !weight.master.empty() && weight.master.buffer == home.home;
    });
    CHECK(home.compression == (is_master ? sg::Compression::none : kind));
    (is_master ? masters : packed) += 1;
  }
  CHECK(masters > 0);
  CHECK(packed == 2 * masters);
  for (const sg::OffloadedUnit& unit : step.offload.units) CHECK(unit.compression == kind);
}
