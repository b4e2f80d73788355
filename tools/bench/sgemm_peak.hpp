#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/types.hpp"

namespace stepgraph::bench {

// The best speed of square f32 products in GFLOP/s, each size the median of `runs`: the peak that steps are compared
// with. Uses the kernel of the ops, with its tiles spread over the executor's threads.
[[nodiscard]] double sgemm_peak(int threads, const std::vector<std::int64_t>& sizes, int runs);

// The median GFLOP/s of one square product with the op of the models, on another backend and by its device's clock.
[[nodiscard]] double product_peak(const std::string& backend, DType type, std::int64_t size, int runs);

}  // namespace stepgraph::bench
