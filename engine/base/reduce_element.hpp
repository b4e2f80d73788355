#pragma once
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "engine/base/types.hpp"

// The reductions of engine/base/arithmetic.hpp for one element: the loops of the CPU and the kernels of backends/cuda/
// and ops/cuda/ use the same definitions. Everything is constexpr, so that kernels can call it (nvcc's
// --expt-relaxed-constexpr).
namespace stepgraph::reduce_element {

// The type of an element in memory, and the type in which it is reduced.
template <class T, class W = T>
struct Plain {
  using Stored = T;
  using Wide   = W;
  static constexpr Wide load(Stored value) { return static_cast<Wide>(value); }
  static constexpr Stored store(Wide value) { return static_cast<Stored>(value); }
};
template <class Half>
struct InFloat {
  using Stored = std::uint16_t;
  using Wide   = float;
  static constexpr float load(std::uint16_t bits) { return static_cast<float>(Half::from_bits(bits)); }
  static constexpr std::uint16_t store(float value) { return Half(value).bits(); }
};
#if defined(__CUDA_ARCH__)
// A GPU has instructions for f16. They give the same bits as half.hpp, except for NaN.
template <>
struct InFloat<f16> {
  using Stored = std::uint16_t;
  using Wide   = float;
  __device__ static float load(std::uint16_t bits) {
    const std::uint32_t nan = (bits & 0x8000u) << 16 | 0x7f800000u | (bits & 0x3ffu) << 13;
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return (bits & 0x7fffu) > 0x7c00u ? std::bit_cast<float>(nan) : value;
  }
  __device__ static std::uint16_t store(float value) {
    const auto f   = std::bit_cast<std::uint32_t>(value);
    const auto nan = static_cast<std::uint16_t>((f >> 16 & 0x8000u) | 0x7e00u | (f >> 13 & 0x3ffu));
    std::uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return value != value ? nan : bits;
  }
};
#endif

// One element at an address that need not be aligned for it: for kernels, byte by byte.
template <class Stored>
constexpr Stored load_bytes(const std::byte* from) {
  Stored value{};
  __builtin_memcpy(&value, from, sizeof(Stored));
  return value;
}
template <class Stored>
constexpr void store_bytes(std::byte* to, Stored value) {
  __builtin_memcpy(to, &value, sizeof(Stored));
}

// How elements of T are reduced. `Value` is for min and max. `Bits`, unsigned for integers, is for sums and products,
// which wrap around. `Exact`, with 64 bits for integers, is for the sum of an average.
template <class T>
struct Elements {
  using Value = Plain<T>;
  using Bits  = Value;
  using Exact = Value;
};
template <std::integral T>
struct Elements<T> {
  using Value = Plain<T>;
  using Bits  = Plain<std::make_unsigned_t<T>>;
  using Exact = Plain<T, std::uint64_t>;
};
template <class Half>
struct HalfElements {
  using Value = InFloat<Half>;
  using Bits  = Value;
  using Exact = Value;
};
template <>
struct Elements<f16> : HalfElements<f16> {};
template <>
struct Elements<bf16> : HalfElements<bf16> {};

// The sign bit, of zeros too; std::signbit is not constexpr.
template <std::floating_point T>
constexpr bool has_sign(T value) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  return std::bit_cast<Bits>(value) < 0;
}

// An operation combines two values, and finishes the last one: apply(apply(a, b), c), then finish.
struct Add {
  template <class T>
  static constexpr T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
  template <class T>
  static constexpr T finish(T value) {
    return value;
  }
};
struct Multiply {
  template <class T>
  static constexpr T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
  template <class T>
  static constexpr T finish(T value) {
    return value;
  }
};
// Minimum and maximum of IEEE 754-2019. Every NaN becomes the same one, so that the bits do not depend on the order.
struct Extreme {
  template <class T>
  static constexpr T finish(T value) {
    if constexpr (std::floating_point<T>) {
      constexpr T nan = std::numeric_limits<T>::quiet_NaN();
      return value != value ? nan : value;
    } else {
      return value;
    }
  }
};
struct Min : Extreme {
  template <class T>
  static constexpr T apply(T a, T b) {
    if constexpr (std::floating_point<T>) {
      return (a < b) | (a != a) | ((a == b) & has_sign(a)) ? a : b;  // a NaN in b is chosen, too
    } else {
      return b < a ? b : a;
    }
  }
};
struct Max : Extreme {
  template <class T>
  static constexpr T apply(T a, T b) {
    if constexpr (std::floating_point<T>) {
      return (a > b) | (a != a) | ((a == b) & !has_sign(a)) ? a : b;
    } else {
      return b > a ? b : a;
    }
  }
};

// The end of an average. Sums of integers are unsigned, so that they wrap around.
template <class Wide>
constexpr Wide quotient(Wide sum, std::int64_t count) {
  if constexpr (std::is_integral_v<Wide>) {
    return static_cast<Wide>(static_cast<std::int64_t>(sum) / count);
  } else {
    return sum / static_cast<Wide>(count);
  }
}

// Calls f(element, operation, divides) with the types for a reduction of T; `divides`: by the number of inputs.
template <class T, class F>
auto choose(Reduction reduction, const F& f) {
  using Of = Elements<T>;
  switch (reduction) {  // no default: the compiler names a reduction that is missing
    case Reduction::sum:
      return f(typename Of::Bits(), Add(), std::false_type());
    case Reduction::average:
      return f(typename Of::Exact(), Add(), std::true_type());
    case Reduction::min:
      return f(typename Of::Value(), Min(), std::false_type());
    case Reduction::max:
      return f(typename Of::Value(), Max(), std::false_type());
    case Reduction::product:
      return f(typename Of::Bits(), Multiply(), std::false_type());
  }
  throw Error(ErrorKind::config, str("arithmetic: no reduction has the number ", static_cast<int>(reduction)));
}

}  // namespace stepgraph::reduce_element
