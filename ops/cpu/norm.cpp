#include "ops/cpu/norm.hpp"

#include <cmath>

#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"

namespace stepgraph::cpu {

template <class T>
void norm_forward(const Norm<T>& norm, std::int64_t begin_row, std::int64_t end_row) {
  const std::int64_t width = norm.width;
  for (std::int64_t row = begin_row; row < end_row; ++row) {
    const T* x    = norm.x + row * width;
    T* y          = norm.y + row * width;
    double center = 0;
    if (norm.center != nullptr) {
      center = lane_sum<double>(width, [x](std::int64_t i) { return static_cast<double>(x[i]); }) /
               static_cast<double>(width);
      norm.center[row] = static_cast<T>(center);
    }
    // The deviation from the mean itself, not from its square: no cancellation.
    const double squares = lane_sum<double>(width, [x, center](std::int64_t i) {
      const double deviation = static_cast<double>(x[i]) - center;
      return deviation * deviation;
    });
    const auto scale     = static_cast<T>(1 / std::sqrt(squares / static_cast<double>(width) + norm.eps));
    const auto middle    = static_cast<T>(center);
    norm.scale[row]      = scale;
    const T *weight = norm.weight, *bias = norm.bias;
    if (norm.center != nullptr) {
      for (std::int64_t i = 0; i < width; ++i) y[i] = (x[i] - middle) * scale * weight[i] + bias[i];
    } else {
      for (std::int64_t i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
    }
  }
}

// With n = (x - center) * scale and g = dy * weight: dx = scale * (g - mean(g) - n * mean(g n)); the root mean square's
// has no mean(g).
template <class T>
void norm_backward(const NormBackward<T>& norm, const Into<T>& dx, std::int64_t begin_row, std::int64_t end_row) {
  const std::int64_t width = norm.width;
  const T* weight          = norm.weight;
  for (std::int64_t row = begin_row; row < end_row; ++row) {
    const T *x = norm.x + row * width, *dy = norm.dy + row * width;
    const T scale = norm.scale[row], center = norm.center == nullptr ? T(0) : norm.center[row];
    const double along =
        lane_sum<double>(width,
                         [=](std::int64_t i) {
                           return static_cast<double>(dy[i] * weight[i]) * static_cast<double>((x[i] - center) * scale);
                         }) /
        static_cast<double>(width);
    double mean = 0;
    if (norm.center != nullptr) {
      mean = lane_sum<double>(width, [=](std::int64_t i) { return static_cast<double>(dy[i] * weight[i]); }) /
             static_cast<double>(width);
    }
    const auto mean_of_g = static_cast<T>(mean), mean_of_gn = static_cast<T>(along);
    put(dx, row * width, width,
        [=](std::int64_t i) { return scale * (dy[i] * weight[i] - mean_of_g - (x[i] - center) * scale * mean_of_gn); });
  }
}

namespace {

// into[begin + c] += the sum over rows of value(row)(c).
template <class T, class Row>
void add_columns(const Into<T>& into, std::int64_t rows, std::int64_t begin, std::int64_t end, const Row& value) {
  const std::int64_t size       = end - begin;
  double sums[columns_per_tile] = {};
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto at = value(row);
    for (std::int64_t c = 0; c < size; ++c) sums[c] += static_cast<double>(at(c));
  }
  put(into, begin, size, [&sums](std::int64_t c) { return static_cast<T>(sums[c]); });
}

}  // namespace

template <class T>
void norm_weight_gradient(const NormBackward<T>& norm, const Into<T>& dw, std::int64_t rows, std::int64_t begin,
                          std::int64_t end) {
  add_columns(dw, rows, begin, end, [&](std::int64_t row) {
    const T *x = norm.x + row * norm.width + begin, *dy = norm.dy + row * norm.width + begin;
    const T scale = norm.scale[row], center = norm.center == nullptr ? T(0) : norm.center[row];
    return [=](std::int64_t c) { return dy[c] * ((x[c] - center) * scale); };
  });
}

template <class T>
void column_sum(const T* dy, std::int64_t width, const Into<T>& db, std::int64_t rows, std::int64_t begin,
                std::int64_t end) {
  add_columns(db, rows, begin, end, [=](std::int64_t row) {
    const T* at = dy + row * width + begin;
    return [at](std::int64_t c) { return at[c]; };
  });
}

template void norm_forward<float>(const Norm<float>&, std::int64_t, std::int64_t);
template void norm_forward<double>(const Norm<double>&, std::int64_t, std::int64_t);
template void norm_backward<float>(const NormBackward<float>&, const Into<float>&, std::int64_t, std::int64_t);
template void norm_backward<double>(const NormBackward<double>&, const Into<double>&, std::int64_t, std::int64_t);
template void norm_weight_gradient<float>(const NormBackward<float>&, const Into<float>&, std::int64_t, std::int64_t,
                                          std::int64_t);
template void norm_weight_gradient<double>(const NormBackward<double>&, const Into<double>&, std::int64_t, std::int64_t,
                                           std::int64_t);
template void column_sum<float>(const float*, std::int64_t, const Into<float>&, std::int64_t, std::int64_t,
                                std::int64_t);
template void column_sum<double>(const double*, std::int64_t, const Into<double>&, std::int64_t, std::int64_t,
                                 std::int64_t);

}  // namespace stepgraph::cpu
