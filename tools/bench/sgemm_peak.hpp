#pragma once
#include <cstdint>
#include <vector>

namespace stepgraph::bench {

// The best over square products of f32, each size the median of `runs`, in GFLOP/s: what a step is measured against.
// The kernel is that of the ops, its tiles spread over the executor's threads. Its matrices are gone when it returns.
[[nodiscard]] double sgemm_peak(int threads, const std::vector<std::int64_t>& sizes, int runs);

}  // namespace stepgraph::bench
