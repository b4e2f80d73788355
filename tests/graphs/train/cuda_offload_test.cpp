// Offload on a GPU: tensors in pinned memory and on disk, with copies on streams and updates on the host.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <vector>

#include "tests/support/ops/device_case.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/device_training.hpp"

namespace sg = stepgraph;
using sg::testing::History;
using sg::testing::offload_of;
using sg::testing::train_on_device;

TEST_CASE("on a GPU every combination of offloaded classes has the bits of no offload", "[graphs][cuda][offload]") {
  sg::testing::need_device();
  const auto type = GENERATE(sg::DType::f32, sg::DType::bf16);
  for (const bool capture : {false, true}) {
    sg::Plan plan{.precision = {.param = type}};
    const History expected = train_on_device(plan, {.capture = capture});
    for (int classes = 1; classes < 16; ++classes) {
      if (sg::testing::sanitized() && classes != 15) continue;
      CAPTURE(type, capture, classes);
      plan.offload = offload_of(classes);
      CHECK(train_on_device(plan, {.capture = capture}) == expected);
      if (classes != 4 && classes != 15) continue;
      plan.offload.overlap = false;
      CHECK(train_on_device(plan, {.capture = capture}) == expected);
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
    const History expected = train_on_device(plan);
    for (const int classes : {4, 5, 15}) {
      CAPTURE(plan.layout.dp, plan.layout.tp, plan.layout.pp, classes);
      plan.offload = offload_of(classes);
      CHECK(train_on_device(plan) == expected);
    }
    if (sg::testing::sanitized()) return;
  }
}

TEST_CASE("on a GPU updates in the backward pass have the bits of no offload", "[graphs][cuda][offload]") {
  sg::testing::need_device();
  const bool capture = GENERATE(false, true);
  for (sg::Plan plan : std::vector<sg::Plan>{{}, {.precision = {.param = sg::DType::bf16}}, {.layout = {.pp = 2}}}) {
    plan.optimizer.clip    = 0;
    const History expected = train_on_device(plan, {.capture = capture});
    for (const int classes : {4, 6, 15}) {
      for (const bool on_disk : {false, true}) {  // states on disk are streamed
        CAPTURE(capture, plan.layout.pp, plan.precision.param, classes, on_disk);
        plan.offload = offload_of(classes);
        CHECK(train_on_device(plan, {.capture = capture, .on_disk = on_disk}) == expected);
      }
    }
    if (sg::testing::sanitized()) return;
  }
}

TEST_CASE("on a GPU tensors on disk and compressed tensors train", "[graphs][cuda][offload][disk]") {
  sg::testing::need_device();
  sg::Plan plan;
  const History expected = train_on_device(plan);
  plan.offload           = offload_of(15);
  CHECK(train_on_device(plan, {.on_disk = true}) == expected);
  if (sg::is_built(sg::Compression::lossless)) {
    plan.offload.compress = sg::Compression::lossless;
    CHECK(train_on_device(plan) == expected);
    CHECK(train_on_device(plan, {.on_disk = true}) == expected);
  }
  plan.offload          = offload_of(10);
  plan.offload.compress = sg::Compression::int8;
  const History lossy   = train_on_device(plan);
  for (std::size_t i = 0; i < expected.loss.size(); ++i)
    CHECK(std::abs(lossy.loss[i] - expected.loss[i]) < 0.05 * expected.loss[i]);
}
