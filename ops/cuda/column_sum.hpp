#pragma once
#include <optional>

#include "ops/cuda/residual.hpp"

namespace stepgraph::cuda {

// The gradient of what was added to each row of a branch: into (+)= the sum over rows of drop(dy). Sums of rows that
// are close together come first, then sums of those; which are, depends on the shape alone. Takes up to 1 MiB of
// workspace, or as much as one row of sums where that is more, and counters.
template <class T>
void column_sum(const DeviceQueue& queue, const T* dy, std::int64_t rows, std::int64_t width,
                const std::optional<Drop>& drop, const Into<T, Wide<T>>& into);

}  // namespace stepgraph::cuda
