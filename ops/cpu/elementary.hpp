#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/cpu/vector.hpp"

// Functions of one number that loops can be vectorised over: plain arithmetic without a branch or a call, so that the
// last elements of a loop get the same bits as those of its vectors.
namespace stepgraph::cpu {

// e^x. In float: within 2 units in the last place from -87 to 88.3; below that 0, above it infinity (a little earlier
// than the type would ask for); NaN stays NaN.
inline double exp(double x) { return std::exp(x); }
inline float exp(float x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 leaves n in the lowest bits of the sum. ln 2 in two pieces,
  // of which the first has few enough bits that n times it is exact; e^r by the polynomial of Cephes' expf.
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

// 2^x of each element. In float: within 2 units in the last place from -126.5 to 127, below that 0; NaN stays NaN.
// Not for what is above: it is meant for numbers from which their largest has been taken.
inline Vector<double> exp2(Vector<double> x) {
  for (int lane = 0; lane < lanes_of<double>; ++lane) x[lane] = std::exp2(x[lane]);
  return x;
}
[[gnu::always_inline]] inline Vector<float> exp2(Vector<float> x) {
  // x = n + r with |r| <= 1/2; 2^r by the polynomial of Cephes' exp2f, whose power is 0 where n is -127.
  constexpr float to_integer = 12582912.0f, lowest = -127.0f;
  const Vector<float> at_least = x < lowest ? Vector<float>{} + lowest : x;
  const Vector<float> shifted = at_least + to_integer, r = at_least - (shifted - to_integer);
  Vector<float> p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p               = p * r + 9.618437357674640e-3f;
  p               = p * r + 5.550332471162809e-2f;
  p               = p * r + 2.402264791363012e-1f;
  p               = p * r + 6.931472028550421e-1f;
  p               = p * r + 1.0f;
  return p * std::bit_cast<Vector<float>>((std::bit_cast<Vector<std::uint32_t>>(shifted) << 23) + 0x3f800000U);
}

// 1 / (1 + e^-x).
template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + cpu::exp(-x));
}

}  // namespace stepgraph::cpu
