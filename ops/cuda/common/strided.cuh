#pragma once
#include <cstdint>

#include "engine/run/context.hpp"
#include "ops/cuda/common/launch.cuh"

// Rows of a strided access, laid end to end: internal to ops/cuda/.
namespace stepgraph::cuda {

template <class N>
struct Strided {
  N* data;
  std::int64_t length, stride;  // the same: all is one row

  // Where element i is: at one place with those that follow it in its row.
  __device__ N* at(std::int64_t i) const {
    if (length == stride) return data + i;
    if (((i | length) >> 32) == 0) {  // a division of 32 bits is many times as fast as one of 64
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

// Whether n elements from every multiple of n on lie side by side, where one load can read them. The last of them may
// be fewer, if all is one row.
template <int n, class N>
[[nodiscard]] bool packs_fit(const Strided<N>& rows) {
  if (reinterpret_cast<std::uintptr_t>(rows.data) % (n * sizeof(N)) != 0) return false;
  return rows.length == rows.stride || (rows.length % n == 0 && rows.stride % n == 0);
}

}  // namespace stepgraph::cuda
