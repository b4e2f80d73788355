#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/types.hpp"

namespace stepgraph::bench {

// The best speed of square products in GFLOP/s, each size the median of `runs`: the peak that steps are compared with.
// Operands are bf16 if `type` is, else f32. Uses the kernel of the ops, with its tiles spread over the executor's
// threads.
[[nodiscard]] double sgemm_peak(int threads, const std::vector<std::int64_t>& sizes, int runs, DType type);

[[nodiscard]] std::vector<std::int64_t> peak_sizes();  // those that benchmarks try

// The median GFLOP/s of one square product with the op of the models, on a GPU and by its clock.
[[nodiscard]] double product_peak(int device, DType type, std::int64_t size, int runs);

}  // namespace stepgraph::bench
