#include "ops/cuda/updates/loss_scale.hpp"

#include "ops/cuda/common/launch.cuh"

namespace stepgraph::cuda {
namespace {

__device__ void shrink_scale(double& scale, std::int64_t& good_steps, bool dynamic) {
  good_steps = 0;
  if (dynamic) scale /= 2;
}

__device__ void grow_scale(double& scale, std::int64_t& good_steps, bool dynamic, std::int64_t growth_steps) {
  if (++good_steps < growth_steps) return;
  good_steps = 0;
  if (dynamic) scale *= 2;
}

__global__ void update_kernel(LossScaleNumbers of, bool dynamic, std::int64_t growth_steps) {
  if (*of.overflow != 0) return shrink_scale(*of.scale, *of.good_steps, dynamic);
  ++*of.num_updates;
  grow_scale(*of.scale, *of.good_steps, dynamic, growth_steps);
}

__global__ void count_kernel(CountUpdateNumbers of, bool dynamic, std::int64_t growth_steps) {
  if (isnan(*of.set_scale)) return;
  const bool applied = !isnan(*of.factor);
  if (applied) ++*of.num_updates;
  if (of.scale == nullptr) return;
  if (!applied) return shrink_scale(*of.scale, *of.good_steps, dynamic);
  grow_scale(*of.scale, *of.good_steps, dynamic, growth_steps);
}

}  // namespace

void update_loss_scale(const DeviceQueue& queue, const LossScaleNumbers& numbers, bool dynamic,
                       std::int64_t growth_steps) {
  update_kernel<<<1, 1, 0, stream_of(queue)>>>(numbers, dynamic, growth_steps);
  check_launch("update_loss_scale");
}

void count_update(const DeviceQueue& queue, const CountUpdateNumbers& numbers, bool dynamic,
                  std::int64_t growth_steps) {
  count_kernel<<<1, 1, 0, stream_of(queue)>>>(numbers, dynamic, growth_steps);
  check_launch("count_update");
}

}  // namespace stepgraph::cuda
