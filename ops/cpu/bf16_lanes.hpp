#pragma once
#ifdef __aarch64__
#include <arm_neon.h>
#endif
#include <cstdint>
#include <cstring>

#include "engine/base/half.hpp"

// Vectors of floats that are loaded from and stored as bf16. Everything is in an anonymous namespace, because each file
// that includes this header compiles it for other instructions.
#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // functions with these vectors are local to their files
#endif
namespace stepgraph::cpu {
namespace {

// Conversions of vectors. Specialised, because compilers refuse them for types that depend on a template's argument.
template <int lanes>
struct Converted;
template <>
struct Converted<4> {
  typedef float Floats __attribute__((vector_size(16)));         // NOLINT
  typedef std::uint32_t Words __attribute__((vector_size(16)));  // NOLINT
  typedef std::uint16_t Halves __attribute__((vector_size(8)));  // NOLINT
#ifdef __aarch64__                                               // GCC 12 converts vectors of 8 bytes one by one
  static Words words(Halves halves) { return (Words)vmovl_u16((uint16x4_t)halves); }
  static Halves halves(Words words) { return (Halves)vmovn_u32((uint32x4_t)words); }
#else
  static Words words(Halves halves) { return __builtin_convertvector(halves, Words); }
  static Halves halves(Words words) { return __builtin_convertvector(words, Halves); }
#endif
};
template <>
struct Converted<16> {
  typedef float Floats __attribute__((vector_size(64)));          // NOLINT
  typedef std::uint32_t Words __attribute__((vector_size(64)));   // NOLINT
  typedef std::uint16_t Halves __attribute__((vector_size(32)));  // NOLINT
  static Words words(Halves halves) { return __builtin_convertvector(halves, Words); }
  static Halves halves(Words words) { return __builtin_convertvector(words, Halves); }
};

template <int lanes>
struct Bf16Lanes : Converted<lanes> {
  using typename Converted<lanes>::Floats, typename Converted<lanes>::Words, typename Converted<lanes>::Halves;

  [[gnu::always_inline]] static Floats get(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
  }
  [[gnu::always_inline]] static Floats get(const bf16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return widened(halves);
  }
  [[gnu::always_inline]] static void set(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }
  [[gnu::always_inline]] static void set(bf16* to, Floats values) {
    const Halves halves = rounded(values);
    std::memcpy(static_cast<void*>(to), &halves, sizeof halves);
  }
  [[gnu::always_inline]] static Floats widened(Halves halves) {  // bf16 is the upper half of a float
    return reinterpret_cast<Floats>(Bf16Lanes::words(halves) << 16);
  }
  [[gnu::always_inline]] static Halves rounded(Floats values) {  // as bf16 does: to nearest, NaN stays NaN
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    if constexpr (lanes == 4) return (Halves)vcvt_bf16_f32((float32x4_t)values);
#endif
    const Words bits    = reinterpret_cast<Words>(values);
    const Words nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return Bf16Lanes::halves((bits & 0x7fffffff) > 0x7f800000 ? quiet : nearest);
  }
  // What is stored: `times` multiplies the rounded value.
  [[gnu::always_inline]] static Floats stored(Floats values, float) { return values; }
  [[gnu::always_inline]] static Floats stored(Floats values, bf16) { return widened(rounded(values)); }
};

}  // namespace
}  // namespace stepgraph::cpu
#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
