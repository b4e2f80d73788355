#pragma once
#include "ops/cuda/common/pack.cuh"
#include "ops/cuda/common/random_mask.cuh"
#include "ops/cuda/layers/residual.hpp"

// Dropout in kernels. Internal to ops/cuda/.
namespace stepgraph::cuda {

// Kernels without dropout are separate instantiations: they need fewer registers.
struct NoDrop {};
template <class Call>
void with_drop(const std::optional<Drop>& drop, const Call& call) {
  if (drop) {
    call(*drop);
  } else {
    call(NoDrop{});
  }
}

template <int n, class W>
__device__ void drop_values(const NoDrop&, std::int64_t, W*) {}
// Applies dropout to n values, the first of which is element i of the matrix.
template <int n, class W>
__device__ void drop_values(const Drop& drop, std::int64_t i, W* values) {
  RandomMask mask(drop.key, *drop.step, drop.dropped);
  const auto scale = static_cast<W>(drop.scale);
#pragma unroll
  for (int k = 0; k < n; ++k) {
    values[k] = mask.keeps(static_cast<std::uint64_t>(drop.first + i + k)) ? values[k] * scale : W(0);
  }
}

}  // namespace stepgraph::cuda
