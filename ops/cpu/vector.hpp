#pragma once
#include <cstdint>
#include <type_traits>

#include "ops/cpu/level.hpp"
#if defined(STEPGRAPH_NEON)
#include <arm_neon.h>
#endif

// Vectors of the width of the instructions that a file is compiled for, through the compiler's vector extension:
// arithmetic, comparison and selection work as on scalars. For kernels whose loops must be vectorised.
namespace stepgraph::cpu {
inline namespace STEPGRAPH_LEVEL {

// Not by the compiler's macros alone: it reads these before it knows the level's instructions.
#if defined(STEPGRAPH_AVX512) || (defined(__AVX512F__) && !defined(STEPGRAPH_AVX2))
inline constexpr int vector_bytes = 64;
#elif defined(STEPGRAPH_AVX2) || defined(__AVX2__)  // AVX alone has no integer vectors of this width
inline constexpr int vector_bytes = 32;
#else
inline constexpr int vector_bytes = 16;
#endif

namespace detail {
// A typedef keeps the attributes; an alias template would lose them. `unaligned` may alias any address.
template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(vector_bytes)));                              // NOLINT
  typedef T unaligned __attribute__((vector_size(vector_bytes), aligned(1), may_alias));  // NOLINT
};
}  // namespace detail
template <class T>
using Vector = typename detail::VectorOf<T>::type;
template <class T>
inline constexpr int lanes_of = vector_bytes / static_cast<int>(sizeof(T));
// Integers as wide as T: the result type of comparing vectors of T.
template <class T>
using LaneInteger = std::conditional_t<sizeof(T) == 8, std::int64_t, std::int32_t>;

template <class T>
[[gnu::always_inline]] inline Vector<T> load_vector(const T* from) {
  return *reinterpret_cast<const typename detail::VectorOf<T>::unaligned*>(from);
}
template <class T>
[[gnu::always_inline]] inline void store_vector(T* to, Vector<T> values) {
  *reinterpret_cast<typename detail::VectorOf<T>::unaligned*>(to) = values;
}
// The lanewise maximum; `b` where a lane of `a` is NaN.
template <class V>
[[gnu::always_inline]] inline V larger(V a, V b) {
  return a > b ? a : b;
}
#if defined(STEPGRAPH_NEON)
// One instruction, where compilers need two. Here a NaN in `b` gives `a`, too.
[[gnu::always_inline]] inline Vector<float> larger(Vector<float> a, Vector<float> b) { return vmaxnmq_f32(a, b); }
#endif
// The lanewise maximum, where NaN stays NaN.
[[gnu::always_inline]] inline Vector<float> at_least(Vector<float> a, float least) {
#if defined(STEPGRAPH_NEON)
  return vmaxq_f32(a, vdupq_n_f32(least));
#else
  Vector<float> all = Vector<float>{} + least;
#if defined(__x86_64__)
  asm("" : "+v"(all));  // if it knows the number, the compiler does not find its instruction for a maximum
#endif
  return larger(all, a);
#endif
}
// first, first + 1, ...
template <class T>
[[gnu::always_inline]] inline Vector<LaneInteger<T>> counting_from(LaneInteger<T> first) {
  Vector<LaneInteger<T>> made = {};
  for (int lane = 0; lane < lanes_of<T>; ++lane) made[lane] = first + lane;
  return made;
}

}  // namespace STEPGRAPH_LEVEL
}  // namespace stepgraph::cpu
