#pragma once
#include <cmath>
#include <cstdint>

// The scalars of an update, from the numbers that users give: the same on CPUs and devices, to the bit. Internal to
// ops/. Files that include it are compiled without contraction, so that each operation is rounded.
namespace stepgraph {

// beta1 and beta2 to the power of `steps`, by repeated squaring: a library's pow differs from machine to machine. Both
// in one loop, because all threads of a device wait for them. The relative error grows with the steps, but the powers
// shrink as fast.
struct BetaPowers {
  double of_beta1 = 1, of_beta2 = 1;
  constexpr BetaPowers(double beta1, double beta2, std::int64_t steps) noexcept {
    for (; steps > 0; steps >>= 1, beta1 *= beta1, beta2 *= beta2) {
      if ((steps & 1) == 0) continue;
      of_beta1 *= beta1;
      of_beta2 *= beta2;
    }
  }
};

struct AdamWScalars {
  double factor, rate, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // from 1
};
// With them, for a gradient G, in PyTorch's order (weight decay first, then both means, both bias-corrected):
//   g = factor G;  m += new1 (g - m);  v = beta2 v + new2 g g;  w = keep w - size m / (unroot2 sqrt(v) + eps)
template <class T>
struct AdamWFactors {
  T factor, keep, new1, beta2, new2, unroot2, eps, size;
};
template <class T>
[[nodiscard]] constexpr AdamWFactors<T> adamw_factors(const AdamWScalars& of) noexcept {
  const BetaPowers powers(of.beta1, of.beta2, of.step);
  const double unbiased1 = 1 - powers.of_beta1, unbiased2 = 1 - powers.of_beta2;
  const double decayed = of.rate * of.weight_decay;
  return {.factor  = static_cast<T>(of.factor),
          .keep    = static_cast<T>(1 - decayed),
          .new1    = static_cast<T>(1 - of.beta1),
          .beta2   = static_cast<T>(of.beta2),
          .new2    = static_cast<T>(1 - of.beta2),
          .unroot2 = static_cast<T>(1 / std::sqrt(unbiased2)),
          .eps     = static_cast<T>(of.eps),
          .size    = static_cast<T>(of.rate / unbiased1)};
}

}  // namespace stepgraph
