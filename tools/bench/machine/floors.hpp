#pragma once
#include <cstdint>

namespace stepgraph::bench {

// What the cores and the memory can do at most, by plain loops on threads of their own.
struct Floors {
  double fma_gflops = 0;  // of f32, in registers
  double triad_gbps = 0;  // a = b + s c over arrays that are larger than most caches

  // The shortest time for so much work, in seconds.
  [[nodiscard]] double seconds(double flops, double bytes) const noexcept;
};
[[nodiscard]] Floors measure_floors(int threads, bool dry_run);
// Floors::fma_gflops as it is now, in about 25 ms.
[[nodiscard]] double measure_fma_gflops(int threads, bool dry_run);

// The loop that bandwidths of memory are measured with.
inline void triad(float* __restrict a, const float* __restrict b, const float* __restrict c, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) a[i] = b[i] + 3.0f * c[i];
}

}  // namespace stepgraph::bench
