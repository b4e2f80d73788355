#pragma once
#include "engine/base/half.hpp"
#include "engine/base/types.hpp"

// Storage type and compute type of elements: bf16 and f16 are computed in float, float and double in themselves.
// Kernels that support 2-byte types read with wide() and write with narrow().
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
