#include "ops/cuda/loss_scale.hpp"

#include "ops/cuda/common/launch.cuh"

namespace stepgraph::cuda {
namespace {

__global__ void update_kernel(LossScaleNumbers of, bool dynamic, std::int64_t growth_steps) {
  if (*of.overflow != 0) {
    *of.good_steps = 0;
    if (dynamic) *of.scale /= 2;
    return;
  }
  ++*of.num_updates;
  if (++*of.good_steps < growth_steps) return;
  *of.good_steps = 0;
  if (dynamic) *of.scale *= 2;
}

}  // namespace

void update_loss_scale(const DeviceQueue& queue, const LossScaleNumbers& numbers, bool dynamic,
                       std::int64_t growth_steps) {
  update_kernel<<<1, 1, 0, stream_of(queue)>>>(numbers, dynamic, growth_steps);
  check_launch("update_loss_scale");
}

}  // namespace stepgraph::cuda
