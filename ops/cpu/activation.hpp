#pragma once
#include <cmath>
#include <numbers>

#include "ops/cpu/elementary.hpp"

// Each function and its derivative, for one element.
namespace stepgraph::cpu {

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x * sigmoid(2 u): no cancellation where tanh
// is near -1.
struct GeluTanh {
  template <class T>
  static T twice_u(T x) {
    constexpr T a = T(2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi), b = T(0.044715);
    return a * (x + b * x * x * x);
  }
  template <class T>
  static T value(T x) {
    return x * sigmoid(twice_u(x));
  }
  template <class T>
  static T slope(T x) {
    constexpr T a = T(2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi), b = T(3 * 0.044715);
    const T s = sigmoid(twice_u(x));
    return s + x * s * (T(1) - s) * (a * (T(1) + b * x * x));
  }
};

// x * Phi(x), the normal distribution's.
struct GeluExact {
  template <class T>
  static T phi(T x) {
    return T(0.5) * std::erfc(x * T(-1 / std::numbers::sqrt2));
  }
  template <class T>
  static T value(T x) {
    return x * phi(x);
  }
  template <class T>
  static T slope(T x) {
    constexpr T density = T(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
    return phi(x) + x * density * cpu::exp(T(-0.5) * x * x);
  }
};

struct Silu {
  template <class T>
  static T value(T x) {
    return x * sigmoid(x);
  }
  template <class T>
  static T slope(T x) {
    const T s = sigmoid(x);
    return s + x * s * (T(1) - s);
  }
};

}  // namespace stepgraph::cpu
