#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/cpu/vector.hpp"

// Elementary functions for vectorised loops: plain arithmetic without branches or calls, so that the tail of a loop
// gets the same bits as its vectors.
namespace stepgraph::cpu {
inline namespace STEPGRAPH_LEVEL {

// e^x. In float: within 2 units in the last place from -87 to 88.3; below that 0, above it infinity (slightly before
// the type overflows); NaN stays NaN.
inline double exp(double x) { return std::exp(x); }
inline float exp(float x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 leaves n in the lowest bits of the sum. ln 2 is split into
  // two parts; the first has few enough bits that n times it is exact. e^r is the polynomial of Cephes' expf.
  constexpr float to_integer = 12582912.0f, lowest = -87.0f, highest = 88.3f;
  const float shifted = x * 1.44269504088896341f + to_integer;
  const float n       = shifted - to_integer;
  const float r       = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p             = 1.9875691500e-4f;
  p                   = p * r + 1.3981999507e-3f;
  p                   = p * r + 8.3334519073e-3f;
  p                   = p * r + 4.1665795894e-2f;
  p                   = p * r + 1.6666665459e-1f;
  p                   = p * r + 5.0000001201e-1f;
  p                   = p * (r * r) + r + 1.0f;
  const float power   = std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) << 23) + 0x3f800000U);  // 2^n
  const float y       = p * power;
  const float floored = x < lowest ? 0.0f : y;
  return x > highest ? std::numeric_limits<float>::infinity() : floored;
}

// 2^x of each element. In float: within 3 units in the last place from -126.5 to 127, below that 0; NaN stays NaN. Not
// defined above 127: arguments are meant to have their maximum subtracted.
inline Vector<double> exp2(Vector<double> x) {
  for (int lane = 0; lane < lanes_of<double>; ++lane) x[lane] = std::exp2(x[lane]);
  return x;
}
[[gnu::always_inline]] inline Vector<float> exp2(Vector<float> x) {
  // x = n + r with |r| <= 1/2. Adding 1.5 * 2^23 + 127 leaves n + 127 in the lowest bits; shifted, they are 2^n, and 0
  // for n = -127, to which everything below the range is raised. 2^r is the degree-5 polynomial of least relative error
  // (Remez) with its constant set to 1, evaluated in pairs for a short dependency chain.
  constexpr float to_integer  = 12583039.0f;
  using Bits                  = Vector<std::uint32_t>;
  x                           = at_least(x, -127.0f);
  const Vector<float> shifted = x + to_integer, r = x - (shifted - to_integer), square = r * r;
  const Vector<float> low = r * 0.693146978f + 1.0f, middle = r * 0.0555073375f + 0.240222421f,
                      high = r * 1.32647290e-3f + 9.67151366e-3f;
  const Vector<float> p    = (high * square + middle) * square + low;
  return p * __builtin_bit_cast(Vector<float>, __builtin_bit_cast(Bits, shifted) << 23);
}

// log2 of each element. In float: of positive normal numbers, within 2 units in the last place; NaN stays NaN.
inline Vector<double> log2(Vector<double> x) {
  for (int lane = 0; lane < lanes_of<double>; ++lane) x[lane] = std::log2(x[lane]);
  return x;
}
[[gnu::always_inline]] inline Vector<float> log2(Vector<float> x) {
  // x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); 0x3f3504f3 are the bits of sqrt(1/2). The polynomial for
  // ln(1 + f) is that of Cephes' logf.
  using Bits      = Vector<std::int32_t>;
  const Bits bits = __builtin_bit_cast(Bits, x), n = (bits - 0x3f3504f3) >> 23;
  const Vector<float> f  = __builtin_bit_cast(Vector<float>, bits - (n << 23)) - 1.0f;
  Vector<float> p        = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p                      = p * f + 1.1676998740e-1f;
  p                      = p * f - 1.2420140846e-1f;
  p                      = p * f + 1.4249322787e-1f;
  p                      = p * f - 1.6668057665e-1f;
  p                      = p * f + 2.0000714765e-1f;
  p                      = p * f - 2.4999993993e-1f;
  p                      = p * f + 3.3333331174e-1f;
  const Vector<float> ln = (p * f - 0.5f) * (f * f) + f;
  const Vector<float> y  = ln * 1.44269504088896341f + __builtin_convertvector(n, Vector<float>);
  return x == x ? y : x;
}

// 1 / (1 + e^-x).
template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + cpu::exp(-x));
}

}  // namespace STEPGRAPH_LEVEL
}  // namespace stepgraph::cpu
