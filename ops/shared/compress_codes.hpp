#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "engine/base/half.hpp"

// The numbers of compressed elements, shared by the kernels for CPUs and CUDA so that both have the same bits. Internal
// to ops/. Products and sums are rounded one by one: files that include it are compiled without contraction.
namespace stepgraph::codes {

inline constexpr std::int64_t block_elements = 256;  // of int8 and dynamic8
inline constexpr std::int64_t scale_bytes    = 4;    // an f32 before the codes of each block

inline constexpr std::uint32_t magnitude_bits = 0x7fffffffu, infinity_bits = 0x7f800000u;
[[nodiscard]] constexpr float quiet_nan() noexcept { return std::bit_cast<float>(std::uint32_t{0x7fc00000u}); }
[[nodiscard]] constexpr std::uint32_t magnitude_of(float x) noexcept {
  return std::bit_cast<std::uint32_t>(x) & magnitude_bits;
}

// An element in f32. Rounded if it is an f64. A NaN of f64 becomes the NaN that all machines have.
template <class T>
[[nodiscard]] constexpr float to_float(T x) noexcept {
  if constexpr (std::is_same_v<T, double>) {
    return x != x ? quiet_nan() : static_cast<float>(x);
  } else {
    return static_cast<float>(x);
  }
}
// Back to the element's type.
template <class T>
[[nodiscard]] constexpr T from_float(float x) noexcept {
  if constexpr (std::is_same_v<T, double>) {
    return x != x ? std::bit_cast<double>(std::uint64_t{0x7ff8} << 48) : static_cast<double>(x);
  } else {
    return static_cast<T>(x);
  }
}

// The nearest integer, ties to even, for |x| < 2^22. NaN and larger numbers give any integer.
[[nodiscard]] constexpr std::int32_t nearest(float x) noexcept {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: its last bit is worth 1
  return static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x + shift) - std::bit_cast<std::uint32_t>(shift));
}

// Scales are normal numbers even for a block of zeros, so that quotients are finite. No reference to a constant is
// taken here (std::max would): a device does not have its memory.
[[nodiscard]] constexpr float normal(float scale) noexcept { return scale > 0x1p-126f ? scale : 0x1p-126f; }

// int8: integers from -127 to 127 times a scale. -128 is any number that is not finite, and comes back as NaN.
struct Int8 {
  [[nodiscard]] static constexpr float scale(float largest) noexcept {
    constexpr float most = 0x1.020406p+121f;  // 127 of it are finite
    const float wanted   = normal(largest / 127.0f);
    return wanted < most ? wanted : most;
  }
  [[nodiscard]] static constexpr std::uint8_t encode(float x, float scale) noexcept {
    const std::int32_t code = nearest(x / scale);
    return static_cast<std::uint8_t>(magnitude_of(x) < infinity_bits ? code : -128);
  }
  [[nodiscard]] static constexpr float decode(std::uint8_t code, float scale) noexcept {
    const float value = static_cast<float>(static_cast<std::int8_t>(code)) * scale;
    return code == 0x80 ? quiet_nan() : value;
  }
};

// dynamic8: the sign is the first bit. The other seven are 2^p + f with f < 2^p: the number 10^(p - 6) (0.1 + 0.9 (f +
// 1) / 2^p) times the scale, or 0. So each decade below the largest number has half the values of the one above it. The
// code -0 is any number that is not finite.
struct Dynamic8 {
  [[nodiscard]] static constexpr float scale(float largest) noexcept { return normal(largest); }

  // 2^p - 1 + the position in the decade is linear: slope * x + offset.
  struct Decade {
    float end, slope, offset;  // numbers up to `end`
  };
  [[nodiscard]] static constexpr Decade decade(int p) noexcept {
    double end = 1;
    for (int i = p; i < 6; ++i) end /= 10;
    if (p == 0) return {static_cast<float>(end), 1e6f, 0.0f};  // between 0 and its only value
    const double values = 1 << p;
    return {static_cast<float>(end), static_cast<float>(values / (0.9 * end)), static_cast<float>(values * 8 / 9 - 1)};
  }

  [[nodiscard]] static constexpr std::uint8_t encode(float x, float scale) noexcept {
    const float size    = std::bit_cast<float>(magnitude_of(x)) / scale;
    constexpr Decade d0 = decade(0), d1 = decade(1), d2 = decade(2), d3 = decade(3), d4 = decade(4), d5 = decade(5),
                     d6 = decade(6);
    float slope = d6.slope, offset = d6.offset;  // selections, no branches: for vectors
    slope = size <= d5.end ? d5.slope : slope, offset = size <= d5.end ? d5.offset : offset;
    slope = size <= d4.end ? d4.slope : slope, offset = size <= d4.end ? d4.offset : offset;
    slope = size <= d3.end ? d3.slope : slope, offset = size <= d3.end ? d3.offset : offset;
    slope = size <= d2.end ? d2.slope : slope, offset = size <= d2.end ? d2.offset : offset;
    slope = size <= d1.end ? d1.slope : slope, offset = size <= d1.end ? d1.offset : offset;
    slope = size <= d0.end ? d0.slope : slope, offset = size <= d0.end ? d0.offset : offset;
    const float scaled        = size * slope;
    const std::int32_t code   = nearest(scaled + offset);
    const std::int32_t sign   = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x) >> 24 & 0x80u);
    const std::int32_t finite = code == 0 ? 0 : code | sign;
    return static_cast<std::uint8_t>(magnitude_of(x) < infinity_bits ? finite : 0x80);
  }

  // The 128 magnitudes.
  [[nodiscard]] static constexpr std::array<float, 128> magnitudes() noexcept {
    std::array<float, 128> made{};
    double end = 1e-6;
    for (int p = 0, code = 1; p < 7; ++p, end *= 10) {
      for (int f = 0; f < 1 << p; ++f) {
        made[static_cast<std::size_t>(code++)] = static_cast<float>(end * (0.1 + 0.9 * (f + 1) / (1 << p)));
      }
    }
    made[127] = 1;
    return made;
  }
  [[nodiscard]] static constexpr float decode(std::uint8_t code, float scale, const float* magnitudes) noexcept {
    const float size         = magnitudes[code & 0x7f] * scale;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(size) | (code & 0x80u) << 24;
    return code == 0x80 ? quiet_nan() : std::bit_cast<float>(bits);
  }
};

}  // namespace stepgraph::codes
