#pragma once
#include <cstdint>

#include "ops/cuda/common/launch.cuh"
#include "ops/tape/tensor.hpp"

// Several elements that a thread loads or stores at once. Internal to ops/cuda/.
namespace stepgraph::cuda {

inline constexpr std::size_t vector_bytes = 16;  // the widest load

template <class T, int n>
struct alignas(sizeof(T) * n < vector_bytes ? sizeof(T) * n : vector_bytes) Pack {
  T at[n];
};
// Elements per load.
template <class T>
inline constexpr int elements_per_vector = static_cast<int>(vector_bytes / sizeof(T));

template <int n, class T>
__device__ Pack<T, n> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, n>*>(from);
}
template <int n, class T>
__device__ void store_pack(T* to, const Pack<T, n>& pack) {
  *reinterpret_cast<Pack<T, n>*>(to) = pack;
}
// Guarantees a single store instruction: after a branch the compiler may store elements one by one.
template <int n, class T>
__device__ void store_whole(T* to, const Pack<T, n>& pack) {
  if constexpr (sizeof(pack) == vector_bytes) {
    uint4 bits;
    __builtin_memcpy(&bits, &pack, sizeof(bits));
    __stwb(reinterpret_cast<uint4*>(to), bits);
  } else {
    store_pack<n>(to, pack);
  }
}

// Whether all pointers are aligned for vectors; null is.
template <class... T>
[[nodiscard]] bool vectors_fit(const T*... at) {
  return ((reinterpret_cast<std::uintptr_t>(at) % vector_bytes == 0) && ...);
}

// The compute type of a CUDA element type.
template <class N>
using Computed = decltype(widen(N{}));

// stepgraph::Into for kernels: out = base + value, or value without a base. out and base may be the same.
template <class N>
struct Sum {
  N* out;
  const N* base;

  template <int n>
  __device__ Pack<N, n> before(std::int64_t i) const {
    return base == nullptr ? Pack<N, n>{} : load_pack<n>(base + i);
  }
  // `was`: the result of `before` for the same i.
  template <int n>
  __device__ Pack<N, n> with(const Pack<N, n>& was, const Computed<N>* values) const {
    Pack<N, n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      to.at[k] = narrow_to<N>(base == nullptr ? values[k] : widen(was.at[k]) + values[k]);
    }
    return to;
  }
  template <int n>
  __device__ void put(std::int64_t i, const Pack<N, n>& was, const Computed<N>* values) const {
    store_pack<n>(out + i, with<n>(was, values));
  }
};
template <class T, class S>
[[nodiscard]] Sum<Native<S>> sum_of(const Into<T, S>& into) {
  return {native(into.out), native(into.base)};
}

// i / by and i % by, with a 32-bit division where possible: it is many times faster than a 64-bit one.
struct Split {
  std::int64_t quotient, rest;
};
__device__ inline Split split(std::int64_t i, std::int64_t by) {
  if (((i | by) >> 32) == 0) {
    const auto of = static_cast<std::uint32_t>(i), d = static_cast<std::uint32_t>(by), q = of / d;
    return {q, of - q * d};
  }
  return {i / by, i % by};
}

}  // namespace stepgraph::cuda
