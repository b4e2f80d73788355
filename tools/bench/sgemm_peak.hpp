#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/types.hpp"

namespace stepgraph::bench {

// The best over square products of f32, each size the median of `runs`, in GFLOP/s: what a step is measured against.
// The kernel is that of the ops, its tiles spread over the executor's threads. Its matrices are gone when it returns.
[[nodiscard]] double sgemm_peak(int threads, const std::vector<std::int64_t>& sizes, int runs);

// GFLOP/s of one square product by the op that models use, on another backend: the median, by that device's clock.
[[nodiscard]] double product_peak(const std::string& backend, DType type, std::int64_t size, int runs);

}  // namespace stepgraph::bench
