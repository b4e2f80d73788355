#include "graphs/step/offload/idle_settings.hpp"

#include <catch2/catch_test_macros.hpp>

#include "graphs/step/training_step.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;

namespace {

constexpr sg::BatchSpec batch{.global = 4, .micro = 2, .seq = 8};

std::string note_of(const sg::OffloadPlan& offload) {
  const sg::StepGraph step = sg::training_step(sg::testing::small_gpt2(), {.offload = offload}, batch);
  return sg::idle_settings_text(offload, sg::use_of(step.offload.units));
}

}  // namespace

TEST_CASE("settings of offload without effect are named in one line", "[graphs][offload]") {
  const sg::testing::TempFolder folder;
  const std::string disk = folder.path().string();
  CHECK(note_of({}) == "");
  CHECK(note_of({.optimizer = true}) == "");
  CHECK(note_of({.optimizer = true, .slots = 4, .compress = sg::Compression::bf16}) == "");
  CHECK(note_of({.grads = true, .optimizer = true, .slots = 4}) == "");
  CHECK(note_of({.optimizer = true, .host_bytes = 96 << 10, .disk = disk}) == "");
  // Everything fits the device.
  CHECK(note_of({.params = true, .device_bytes = 1 << 30}) == "");
  CHECK(note_of({.params = true, .device_bytes = 1 << 30, .slots = 4}) ==
        "note: offload.slots has no effect: nothing is moved, because the step fits the device");
  CHECK(note_of({.params       = true,
                 .strategy     = sg::OffloadStrategy::extreme,
                 .device_bytes = 1 << 30,
                 .host_bytes   = 1 << 30,
                 .disk_bytes   = 1 << 30,
                 .disk         = disk,
                 .compress     = sg::Compression::bf16}) ==
        "note: offload.compress, offload.host_bytes, offload.disk and offload.disk_bytes have no effect: nothing is "
        "moved, because the step fits the device");
  // Without a size of the device.
  CHECK(sg::idle_settings_text({.activations = true, .slots = 4}, {}) ==
        "note: offload.slots has no effect: nothing is moved: all that may be moved is used again too soon");
  // The key that keeps weights on the device is named as the reason, and not as a setting without effect.
  CHECK(note_of({.params = true, .device_param_bytes = 1 << 30}) ==
        "note: offload.params has no effect: offload.device_param_bytes keeps all weights on the device");
  CHECK(note_of({.params = true, .optimizer = true, .device_param_bytes = 1 << 30}) ==
        "note: offload.params has no effect: offload.device_param_bytes keeps all weights on the device");
  CHECK(note_of({.params = true, .device_param_bytes = 1 << 30, .slots = 4}) ==
        "note: offload.params has no effect: offload.device_param_bytes keeps all weights on the device; offload.slots "
        "has no effect: nothing is moved");
  // The host updates all units where their states lie.
  CHECK(note_of({.optimizer = true, .slots = 4}) ==
        "note: offload.slots has no effect: the host updates all that is moved, in place");
  // Elements of two bytes.
  const sg::OffloadPlan two{.params = true, .compress = sg::Compression::bf16};
  const sg::StepGraph low =
      sg::training_step(sg::testing::small_gpt2(), {.offload = two, .precision = {.param = sg::DType::bf16}}, batch);
  CHECK(sg::idle_settings_text(two, sg::use_of(low.offload.units)) ==
        "note: offload.compress has no effect: nothing that is moved can be compressed");
  // The disk is not used.
  CHECK(note_of({.optimizer = true, .host_bytes = 1 << 30, .disk = disk}) ==
        "note: offload.disk has no effect: host memory has room for all that is moved");
  CHECK(note_of({.optimizer = true, .disk_bytes = 1 << 30, .disk = disk}) ==
        "note: offload.disk and offload.disk_bytes have no effect: offload.host_bytes is not limited, so all that is "
        "moved lies in host memory");
}

TEST_CASE("each reason is named once", "[graphs][offload]") {
  const sg::OffloadPlan plan{.params             = true,
                             .optimizer          = true,
                             .strategy           = sg::OffloadStrategy::extreme,
                             .device_param_bytes = 1 << 20,
                             .host_bytes         = 1 << 20,
                             .disk               = "spill",
                             .compress           = sg::Compression::bf16};
  CHECK(sg::idle_settings_text(plan, {.something = true}) ==
        "note: offload.disk has no effect: host memory has room for all that is moved; offload.device_param_bytes has "
        "no effect: no weights are moved; offload.compress has no effect: nothing that is moved can be compressed");
  CHECK(sg::idle_settings_text(plan, {.something = true, .disk = true, .params = true, .compressed = true}) == "");
}
