#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "ops/cpu/elementary.hpp"
#include "ops/cpu/with_best.hpp"
#include "ops/tape/number.hpp"

// Each activation function and its derivative, for one element.
namespace stepgraph::cpu {

template <class T>
struct ValueSlope {
  T value, slope;
};

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3). This equals x * sigmoid(2 u), which has no
// cancellation where tanh is near -1.
struct GeluTanh {
  template <class T>
  static T twice_u(T x) {
    constexpr T a = T(2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi), b = T(0.044715);
    return a * (x + b * x * x * x);
  }
  template <class T>
  static ValueSlope<T> both(T x) {
    constexpr T a = T(2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi), b = T(3 * 0.044715);
    const T s = sigmoid(twice_u(x));
    return {x * s, s + x * s * (T(1) - s) * (a * (T(1) + b * x * x))};
  }
  template <class T>
  static T value(T x) {
    return x * sigmoid(twice_u(x));
  }
  template <class T>
  static T slope(T x) {
    return both(x).slope;
  }
};

// x * Phi(x), where Phi is the cumulative normal distribution.
struct GeluExact {
  static double phi(double x) { return 0.5 * std::erfc(x * (-1 / std::numbers::sqrt2)); }
  // erfc(z) = t exp(-z^2 + P(t)) with t = 1 / (1 + z / 2) for z >= 0: erfcc of Numerical Recipes, relative error below
  // 1.2e-7.
  static float phi(float x) {
    const float z = std::abs(x) * static_cast<float>(1 / std::numbers::sqrt2), t = 1.0f / (1.0f + 0.5f * z);
    float p                  = 0.17087277f;
    p                        = p * t - 0.82215223f;
    p                        = p * t + 1.48851587f;
    p                        = p * t - 1.13520398f;
    p                        = p * t + 0.27886807f;
    p                        = p * t - 0.18628806f;
    p                        = p * t + 0.09678418f;
    p                        = p * t + 0.37409196f;
    p                        = p * t + 1.00002368f;
    p                        = p * t - 1.26551223f;
    const float half_of_tail = 0.5f * t * cpu::exp(p - z * z);
    return x < 0 ? half_of_tail : 1.0f - half_of_tail;
  }
  // share + a b. In double, `share` is a product too, and a compiler could contract either one into the fma. This says
  // which.
  static double plus(double share, double a, double b) { return std::fma(a, b, share); }
  static float plus(float share, float a, float b) { return share + a * b; }
  template <class T>
  static ValueSlope<T> both(T x) {
    constexpr T density = T(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
    const T share = phi(x), term = x * density, by = cpu::exp(T(-0.5) * x * x);
    return {x * share, plus(share, term, by)};
  }
  template <class T>
  static T value(T x) {
    return x * phi(x);
  }
  template <class T>
  static T slope(T x) {
    return both(x).slope;
  }
};

struct Silu {
  template <class T>
  static ValueSlope<T> both(T x) {
    const T s = sigmoid(x);
    return {x * s, s + x * s * (T(1) - s)};
  }
  template <class T>
  static T value(T x) {
    return x * sigmoid(x);
  }
  template <class T>
  static T slope(T x) {
    return both(x).slope;
  }
};

// Loops over blocks of elements do nothing else, so that compilers vectorise them in any context. They process several
// vectors at a time, because an exponential is a long dependency chain.
inline constexpr std::int64_t activation_block = 256;
template <class T, class Function>
[[gnu::always_inline]] inline void transform(const T* __restrict x, std::int64_t count, Wide<T>* __restrict out,
                                             const Function& function) {
  constexpr std::int64_t unrolled = 16;
  std::int64_t i                  = 0;
  for (; i + unrolled <= count; i += unrolled) {
    for (std::int64_t k = 0; k < unrolled; ++k) out[i + k] = function(wide(x[i + k]));
  }
  for (; i < count; ++i) out[i] = function(wide(x[i]));
}
template <class Function, class T>
[[gnu::noinline]] void values(const T* x, std::int64_t count, Wide<T>* out) {
  with_best(x, count, out, [](const T* __restrict from, std::int64_t size, Wide<T>* __restrict to) {
    transform(from, size, to, [](Wide<T> each) { return Function::value(each); });
  });
}
template <class Function, class T>
[[gnu::noinline]] void slopes(const T* x, std::int64_t count, Wide<T>* out) {
  with_best(x, count, out, [](const T* __restrict from, std::int64_t size, Wide<T>* __restrict to) {
    transform(from, size, to, [](Wide<T> each) { return Function::slope(each); });
  });
}

// to = value(x); x is replaced by the slope.
template <class Function, class T>
[[gnu::always_inline]] inline void transform_both(T* __restrict x, std::int64_t count, T* __restrict to) {
  constexpr std::int64_t unrolled = 16;
  const auto one                  = [=](std::int64_t i) {
    const auto [value, slope] = Function::both(wide(x[i]));
    to[i]                     = narrow<T>(value);
    x[i]                      = narrow<T>(slope);
  };
  std::int64_t i = 0;
  for (; i + unrolled <= count; i += unrolled) {
    for (std::int64_t k = 0; k < unrolled; ++k) one(i + k);
  }
  for (; i < count; ++i) one(i);
}

template <class Function, class T>
[[gnu::noinline]] void values_and_slopes(T* __restrict x, std::int64_t count, T* __restrict to) {
  with_best(x, count, to, [](T* __restrict both, std::int64_t size, T* __restrict values) {
    transform_both<Function>(both, size, values);
  });
}

// For each block of [begin, end): computes results with compute(x + at, count, results), then calls finish(at, count,
// results).
template <class T, class Compute, class Finish>
void for_blocks(const T* x, std::int64_t begin, std::int64_t end, const Compute& compute, const Finish& finish) {
  Wide<T> results[activation_block];
  for (std::int64_t at = begin; at < end; at += activation_block) {
    const std::int64_t count = std::min(activation_block, end - at);
    compute(x + at, count, results);
    with_best([&] { finish(at, count, static_cast<const Wide<T>*>(results)); });
  }
}

}  // namespace stepgraph::cpu
