#pragma once
#include <cstdint>

#include "engine/run/device.hpp"

namespace stepgraph::cuda {

// The arguments of op update_loss_scale: one number on the device each.
struct LossScaleNumbers {
  const std::int64_t* overflow = nullptr;
  double* scale                = nullptr;
  std::int64_t* good_steps     = nullptr;
  std::int64_t* num_updates    = nullptr;
};
void update_loss_scale(const DeviceQueue& queue, const LossScaleNumbers& numbers, bool dynamic,
                       std::int64_t growth_steps);

// The arguments of op count_update. Without loss scaling `scale` and `good_steps` are null.
struct CountUpdateNumbers {
  const double* factor      = nullptr;
  const double* set_scale   = nullptr;
  double* scale             = nullptr;
  std::int64_t* good_steps  = nullptr;
  std::int64_t* num_updates = nullptr;
};
void count_update(const DeviceQueue& queue, const CountUpdateNumbers& numbers, bool dynamic, std::int64_t growth_steps);

}  // namespace stepgraph::cuda
