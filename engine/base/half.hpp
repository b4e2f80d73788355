#pragma once
#include <bit>
#include <cstdint>

// Floating-point values of two bytes, as buffers of DType::bf16 and DType::f16 hold them. Arithmetic is done in float.
// Conversions are explicit: exact to float, rounded to nearest (ties to even) from float. NaN stays NaN.
namespace stepgraph {

class bf16 {
 public:
  bf16() = default;
  constexpr explicit bf16(float value) noexcept : bits_(round(std::bit_cast<std::uint32_t>(value))) {}
  [[nodiscard]] constexpr explicit operator float() const noexcept {
    return std::bit_cast<float>(std::uint32_t{bits_} << 16);
  }
  [[nodiscard]] static constexpr bf16 from_bits(std::uint16_t bits) noexcept {
    bf16 value;
    value.bits_ = bits;
    return value;
  }
  [[nodiscard]] constexpr std::uint16_t bits() const noexcept { return bits_; }

 private:
  static constexpr std::uint16_t round(std::uint32_t f) noexcept {
    const std::uint32_t nearest = (f + 0x7fffu + ((f >> 16) & 1u)) >> 16;
    const std::uint32_t quiet   = (f >> 16) | 0x40u;  // a NaN whose last bits would be lost
    return static_cast<std::uint16_t>((f & 0x7fffffffu) > 0x7f800000u ? quiet : nearest);
  }
  std::uint16_t bits_ = 0;
};

class f16 {
 public:
  f16() = default;
  constexpr explicit f16(float value) noexcept : bits_(round(std::bit_cast<std::uint32_t>(value))) {}
  [[nodiscard]] constexpr explicit operator float() const noexcept { return std::bit_cast<float>(widen(bits_)); }
  [[nodiscard]] static constexpr f16 from_bits(std::uint16_t bits) noexcept {
    f16 value;
    value.bits_ = bits;
    return value;
  }
  [[nodiscard]] constexpr std::uint16_t bits() const noexcept { return bits_; }

 private:
  // Both select between results instead of branching, so that loops over them become vector code. Subnormals are
  // converted by a float addition that shifts their bits into place (F. Giesen, "half to float done quick").
  static constexpr std::uint16_t round(std::uint32_t f) noexcept {
    constexpr std::uint32_t magic = 126u << 23;  // 0.5: its last bit is worth 2^-24, half's smallest subnormal
    const std::uint32_t sign      = (f >> 16) & 0x8000u;
    const std::uint32_t size      = f & 0x7fffffffu;
    const float sum               = std::bit_cast<float>(size) + std::bit_cast<float>(magic);
    const std::uint32_t small     = std::bit_cast<std::uint32_t>(sum) - magic;
    const std::uint32_t normal    = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    const std::uint32_t large     = size > 0x7f800000u ? 0x7e00u | ((size >> 13) & 0x3ffu) : 0x7c00u;
    const std::uint32_t finite    = size < (113u << 23) ? small : normal;
    return static_cast<std::uint16_t>(sign | (size >= (143u << 23) ? large : finite));
  }
  static constexpr std::uint32_t widen(std::uint32_t h) noexcept {
    constexpr std::uint32_t magic = 113u << 23;  // 2^-14, half's smallest normal
    const std::uint32_t sign      = (h & 0x8000u) << 16;
    const std::uint32_t size      = (h & 0x7fffu) << 13;
    const std::uint32_t normal    = size + (112u << 23);
    const float difference        = std::bit_cast<float>(size + magic) - std::bit_cast<float>(magic);
    const std::uint32_t small     = std::bit_cast<std::uint32_t>(difference);
    const std::uint32_t large     = size + (224u << 23);  // infinities and NaN: float's largest exponent
    const std::uint32_t finite    = size < (1u << 23) ? small : normal;
    return sign | (size >= (31u << 23) ? large : finite);
  }
  std::uint16_t bits_ = 0;
};

}  // namespace stepgraph
