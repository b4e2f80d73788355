#pragma once
#include <cstdint>

#include "engine/run/context.hpp"
#include "ops/cuda/common/launch.cuh"

// Concatenated rows of a strided access. Internal to ops/cuda/.
namespace stepgraph::cuda {

template <class N>
struct Strided {
  N* data;
  std::int64_t length, stride;  // equal: one contiguous row

  // The address of element i. The following elements of its row are contiguous.
  __device__ N* at(std::int64_t i) const {
    if (length == stride) return data + i;
    if (((i | length) >> 32) == 0) {  // a 32-bit division is many times faster than a 64-bit one
      const auto of = static_cast<std::uint32_t>(i), by = static_cast<std::uint32_t>(length), row = of / by;
      return data + row * stride + (of - row * by);
    }
    return data + i / length * stride + i % length;
  }
};

template <class T>
[[nodiscard]] auto strided(const Rows<T>& rows) {
  using N = std::remove_pointer_t<decltype(native(rows.data))>;
  if (rows.count <= 1 || rows.stride == rows.length) return Strided<N>{native(rows.data), 1, 1};
  return Strided<N>{native(rows.data), rows.length, rows.stride};
}

// Whether one aligned load can read the n elements from every multiple of n on. If all is one row, the last pack may be
// incomplete.
template <int n, class N>
[[nodiscard]] bool packs_fit(const Strided<N>& rows) {
  if (reinterpret_cast<std::uintptr_t>(rows.data) % (n * sizeof(N)) != 0) return false;
  return rows.length == rows.stride || (rows.length % n == 0 && rows.stride % n == 0);
}

}  // namespace stepgraph::cuda
