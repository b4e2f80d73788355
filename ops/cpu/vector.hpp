#pragma once
#include <cstdint>
#include <type_traits>

// Vectors of the width that the compiler was told to use (STEPGRAPH_MARCH), through its own extension: arithmetic,
// comparison and selection work on them as on numbers. For kernels whose loops must be vectors, not just may be.
namespace stepgraph::cpu {

#if defined(__AVX512F__)
inline constexpr int vector_bytes = 64;
#elif defined(__AVX2__)  // AVX alone has no whole numbers of this width
inline constexpr int vector_bytes = 32;
#else
inline constexpr int vector_bytes = 16;
#endif

namespace detail {
// Attributes of a typedef: an alias template would lose them. An unaligned vector may be anywhere among numbers.
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
// Whole numbers as wide as T's: what comparing vectors of T gives.
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
// The larger of each two; where one is not a number, `b`.
template <class V>
[[gnu::always_inline]] inline V larger(V a, V b) {
  return a > b ? a : b;
}
// first, first + 1, ...
template <class T>
[[gnu::always_inline]] inline Vector<LaneInteger<T>> counting_from(LaneInteger<T> first) {
  Vector<LaneInteger<T>> made = {};
  for (int lane = 0; lane < lanes_of<T>; ++lane) made[lane] = first + lane;
  return made;
}

}  // namespace stepgraph::cpu
