#include "ops/cpu/optimizer.hpp"

#include <algorithm>
#include <cmath>

#include "ops/cpu/lanes.hpp"

namespace stepgraph::cpu {
namespace {

// Rows laid end to end, from one element to the end of its row.
template <class T>
struct Stretch {
  T* data;
  std::int64_t size;
};
template <class T>
Stretch<T> stretch(const Rows<T>& rows, std::int64_t element) {
  const std::int64_t row = element / rows.length, offset = element % rows.length;
  return {rows.data + row * rows.stride + offset, rows.length - offset};
}

}  // namespace

// As PyTorch's AdamW: the decay first, then m and v, both corrected for having started at zero.
template <class T>
void adamw(const AdamWRows<T>& rows, const AdamWScalars& scalars, std::int64_t begin, std::int64_t end) {
  const auto steps       = static_cast<double>(scalars.step);
  const double unbiased1 = 1 - std::pow(scalars.beta1, steps), unbiased2 = 1 - std::pow(scalars.beta2, steps);
  const T factor = static_cast<T>(scalars.factor), keep = static_cast<T>(1 - scalars.rate * scalars.weight_decay),
          new1 = static_cast<T>(1 - scalars.beta1), beta2 = static_cast<T>(scalars.beta2),
          new2 = static_cast<T>(1 - scalars.beta2), root2 = static_cast<T>(std::sqrt(unbiased2)),
          eps = static_cast<T>(scalars.eps), size = static_cast<T>(scalars.rate / unbiased1);
  for (std::int64_t at = begin; at < end;) {
    const auto [weight, num_weight]     = stretch(rows.weight, at);
    const auto [first, num_first]       = stretch(rows.first, at);
    const auto [second, num_second]     = stretch(rows.second, at);
    const auto [gradient, num_gradient] = stretch(rows.gradient, at);
    const std::int64_t count            = std::min({num_weight, num_first, num_second, num_gradient, end - at});
    T* __restrict w = weight, * __restrict m = first, * __restrict v = second;
    const T* __restrict of = gradient;
    for (std::int64_t i = 0; i < count; ++i) {
      const T g = of[i] * factor;
      m[i]      = m[i] + (g - m[i]) * new1;
      v[i]      = v[i] * beta2 + new2 * g * g;
      w[i]      = w[i] * keep - size * (m[i] / (std::sqrt(v[i]) / root2 + eps));
    }
    at += count;
  }
}

template <class T>
void sgd(const SgdRows<T>& rows, const SgdScalars& scalars, std::int64_t begin, std::int64_t end) {
  const T factor = static_cast<T>(scalars.factor), rate = static_cast<T>(scalars.rate),
          momentum = static_cast<T>(scalars.momentum), decay = static_cast<T>(scalars.weight_decay);
  for (std::int64_t at = begin; at < end;) {
    const auto [weight, num_weight]     = stretch(rows.weight, at);
    const auto [velocity, num_velocity] = stretch(rows.velocity, at);
    const auto [gradient, num_gradient] = stretch(rows.gradient, at);
    const std::int64_t count            = std::min({num_weight, num_velocity, num_gradient, end - at});
    T* __restrict w = weight, * __restrict v = velocity;
    const T* __restrict of = gradient;
    for (std::int64_t i = 0; i < count; ++i) {
      v[i] = momentum * v[i] + (factor * of[i] + decay * w[i]);
      w[i] = w[i] - rate * v[i];
    }
    at += count;
  }
}

template <class T>
double square_sum(const Rows<const T>& rows) {
  const auto squares = [](const T* values, std::int64_t size) {
    return lane_sum<double>(size, [values](std::int64_t i) {
      const auto value = static_cast<double>(values[i]);
      return value * value;
    });
  };
  const std::int64_t size = rows.length * rows.count;
  double sum              = 0;
  for (std::int64_t begin = 0; begin < size; begin += square_block) {
    const std::int64_t count    = std::min(square_block, size - begin);
    const Stretch<const T> here = stretch(rows, begin);
    if (here.size >= count) {
      sum += squares(here.data, count);
      continue;
    }
    T block[square_block];  // in pieces: side by side first
    for (std::int64_t done = 0; done < count;) {
      const Stretch<const T> piece = stretch(rows, begin + done);
      const std::int64_t some      = std::min(piece.size, count - done);
      std::copy_n(piece.data, some, block + done);
      done += some;
    }
    sum += squares(block, count);
  }
  return sum;
}

template void adamw<float>(const AdamWRows<float>&, const AdamWScalars&, std::int64_t, std::int64_t);
template void adamw<double>(const AdamWRows<double>&, const AdamWScalars&, std::int64_t, std::int64_t);
template void sgd<float>(const SgdRows<float>&, const SgdScalars&, std::int64_t, std::int64_t);
template void sgd<double>(const SgdRows<double>&, const SgdScalars&, std::int64_t, std::int64_t);
template double square_sum<float>(const Rows<const float>&);
template double square_sum<double>(const Rows<const double>&);

}  // namespace stepgraph::cpu
