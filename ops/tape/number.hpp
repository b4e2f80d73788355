#pragma once
#include "engine/base/half.hpp"
#include "engine/base/types.hpp"

// Elements are stored in one type and computed in another that is at least as wide: bf16 and f16 in float, float and
// double in themselves. A kernel that is to know those of two bytes reads with wide() and writes with narrow().
namespace stepgraph {

namespace detail {
template <class T>
struct WideOf {
  using type = T;
};
template <>
struct WideOf<bf16> {
  using type = float;
};
template <>
struct WideOf<f16> {
  using type = float;
};
}  // namespace detail
template <class T>
using Wide = typename detail::WideOf<T>::type;

[[nodiscard]] constexpr float wide(float value) noexcept { return value; }
[[nodiscard]] constexpr double wide(double value) noexcept { return value; }
[[nodiscard]] constexpr float wide(bf16 value) noexcept { return static_cast<float>(value); }
[[nodiscard]] constexpr float wide(f16 value) noexcept { return static_cast<float>(value); }

template <class T>
[[nodiscard]] constexpr T narrow(Wide<T> value) noexcept {
  return static_cast<T>(value);
}

[[nodiscard]] constexpr bool is_half(DType type) noexcept { return type == DType::bf16 || type == DType::f16; }
[[nodiscard]] constexpr DType wide_type(DType type) noexcept { return is_half(type) ? DType::f32 : type; }

}  // namespace stepgraph
