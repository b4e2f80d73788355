#pragma once
#include "graphs/plan/plan.hpp"
#include "tests/support/training/short_training.hpp"

// Short runs on a GPU. Tests are skipped if there is none.
namespace stepgraph::testing {

struct DeviceRun {
  bool capture      = true;
  bool update_first = false;
  bool on_disk      = false;  // offload.disk is a temporary folder, with 64 KiB of host memory
  int steps         = 5;
};
// Trains small_gpt2 on device 0. The losses include one of an evaluation after the fourth step.
[[nodiscard]] History train_on_device(Plan plan, const DeviceRun& run = {});

}  // namespace stepgraph::testing
