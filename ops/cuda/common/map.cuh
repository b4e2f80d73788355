#pragma once
#include <algorithm>

#include "ops/cuda/common/pack.cuh"

// Elementwise kernels. Internal to ops/cuda/. A function has
//   template <int n> struct Loaded;                                          what it reads for n elements
//   template <int n> __device__ Loaded<n> load(std::int64_t i) const;        from element i on
//   template <int n> __device__ void finish(std::int64_t i, const Loaded<n>&) const;
// and may overwrite its input. The tail, which fills no vector, is processed element by element with the same
// operations.
namespace stepgraph::cuda {

inline constexpr int map_threads      = 256;
inline constexpr int packs_per_thread = 2;  // all loaded before the first is processed, for more bytes in flight

template <int n, class F>
__global__ void __launch_bounds__(map_threads) map_kernel(const F f, std::int64_t packs, std::int64_t size) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * (map_threads * packs_per_thread) + threadIdx.x;
  typename F::template Loaded<n> loaded[packs_per_thread];
#pragma unroll
  for (int k = 0; k < packs_per_thread; ++k) {
    const std::int64_t pack = first + k * map_threads;
    if (pack < packs) loaded[k] = f.template load<n>(pack * n);
  }
#pragma unroll
  for (int k = 0; k < packs_per_thread; ++k) {
    const std::int64_t pack = first + k * map_threads;
    if (pack < packs) f.template finish<n>(pack * n, loaded[k]);
  }
  if constexpr (n > 1) {
    const std::int64_t i = packs * n + threadIdx.x;
    if (blockIdx.x == 0 && i < size) f.template finish<1>(i, f.template load<1>(i));
  }
}

// Runs f over elements [0, size). If `vectors`, n at a time: every load and store of n elements from a multiple of n on
// must be aligned.
template <int n, class F>
void map(const DeviceQueue& queue, const char* name, const F& f, std::int64_t size, bool vectors) {
  if (size <= 0) return;
  const auto launch = [&]<int width>(std::integral_constant<int, width>) {
    const std::int64_t packs = size / width;
    const unsigned blocks    = std::max(1u, blocks_for(packs, map_threads * packs_per_thread));
    map_kernel<width><<<blocks, map_threads, 0, stream_of(queue)>>>(f, packs, size);
  };
  if (vectors) {
    launch(std::integral_constant<int, n>());
  } else {
    launch(std::integral_constant<int, 1>());
  }
  check_launch(name);
}

}  // namespace stepgraph::cuda
