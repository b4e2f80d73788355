#pragma once
#include <optional>

#include "ops/cuda/layers/residual.hpp"

namespace stepgraph::cuda {

// The gradient of a bias that was added to each row of a branch: into (+)= the sum over rows of drop(dy). Blocks of
// rows are summed first, then those sums; the blocks depend on the shape alone. Uses counters, and workspace:
// column_sum_workspace.
template <class T>
void column_sum(const DeviceQueue& queue, const T* dy, std::int64_t rows, std::int64_t width,
                const std::optional<Drop>& drop, const Into<T, Wide<T>>& into);

}  // namespace stepgraph::cuda
