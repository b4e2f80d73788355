#pragma once
#include "engine/run/context.hpp"
#include "ops/cuda/common/pack.cuh"

// Concatenated rows of elements, for kernels. Internal to ops/cuda/.
namespace stepgraph::cuda {

template <class N>
struct View {
  N* data;
  std::int64_t length, stride;  // in elements; length 0: one contiguous row
  std::int64_t begin;           // index of the first element

  __device__ N* at(std::int64_t i) const {
    if (length == 0) return data + i;
    const auto [row, column] = split(begin + i, length);
    return data + row * stride + column;
  }
  // Whether the n elements from any multiple of n on are an aligned vector.
  [[nodiscard]] bool fits(int n) const {
    return vectors_fit(data) && (length == 0 || (length % n == 0 && stride % n == 0 && begin % n == 0));
  }
};

// Elements [begin, begin + size) of rows.
template <class N>
[[nodiscard]] View<N> view(const Rows<N>& rows, std::int64_t begin, std::int64_t size) {
  if (rows.count == 1 || rows.length == rows.stride) return {rows.data + begin, 0, 0, 0};
  if (begin / rows.length == (begin + size - 1) / rows.length) {  // in one row
    return {rows.data + begin / rows.length * rows.stride + begin % rows.length, 0, 0, 0};
  }
  return {rows.data, rows.length, rows.stride, begin};
}

}  // namespace stepgraph::cuda
