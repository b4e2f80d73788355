#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "graphs/train/step_run.hpp"

// The state of a run that does not depend on when gradients are applied: weights, optimizer states, the number of
// updates and the loss scale, of the ranks of this process. Internal to graphs/train.
namespace stepgraph {

struct RunState {
  struct Tensor {
    std::size_t place = 0, weight = 0;  // in the step's ranks, and in their weights
    StoredRange StepWeight::*which = nullptr;
    std::vector<std::byte> bytes   = {};
  };
  std::vector<Tensor> tensors = {};
  std::int64_t num_updates    = 0;
  std::optional<double> scale = {};
  std::int64_t good_steps     = 0;
  bool has_weights            = false;
};

[[nodiscard]] RunState take_state(const StepRun& run);
// Of another step of the same model and plan, which may differ in Plan::update.
void put_state(StepRun& run, const RunState& state);

}  // namespace stepgraph
