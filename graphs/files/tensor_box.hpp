#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/tape/tensor_shape.hpp"

// Internal to graphs/: elements of a tensor that checkpoints move between layouts.
namespace stepgraph {

// Indices [begin, begin + size) of one dim of a tensor, in row-major order. `outer` and `inner` are the products of the
// dims before and after it.
struct TensorBox {
  std::int64_t outer = 1;
  std::int64_t inner = 1;
  std::int64_t begin = 0;
  std::int64_t size  = 0;
  [[nodiscard]] std::int64_t row() const noexcept { return size * inner; }  // elements of one outer index
  [[nodiscard]] std::int64_t num_elements() const noexcept { return outer * row(); }
};

[[nodiscard]] inline TensorBox box_of(const TensorShape& shape, int dim, std::int64_t begin, std::int64_t size) {
  TensorBox box{.begin = begin, .size = size};
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i < static_cast<std::size_t>(dim)) box.outer *= shape[i];
    if (i > static_cast<std::size_t>(dim)) box.inner *= shape[i];
  }
  return box;
}

// The elements [first, last) of `from` that are in `to` too: calls use(element of from, element of to, count) for each
// contiguous run, in order, until it returns false. Both are boxes of one tensor and dim.
template <class Use>
void for_runs(const TensorBox& from, std::int64_t first, std::int64_t last, const TensorBox& to, const Use& use) {
  if (first >= last) return;
  if (from.begin == to.begin && from.size == to.size) {
    static_cast<void>(use(first, first, last - first));
    return;
  }
  const std::int64_t low = std::max(from.begin, to.begin), high = std::min(from.begin + from.size, to.begin + to.size);
  if (low >= high) return;
  for (std::int64_t o = first / from.row(); o * from.row() < last; ++o) {
    const std::int64_t start = o * from.row() + (low - from.begin) * from.inner;
    const std::int64_t a     = std::max(start, first);
    const std::int64_t b     = std::min(start + (high - low) * from.inner, last);
    if (a < b && !use(a, o * to.row() + (low - to.begin) * to.inner + (a - start), b - a)) return;
  }
}

}  // namespace stepgraph
