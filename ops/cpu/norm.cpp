#include "ops/cpu/norm.hpp"

#include <cmath>

#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"
#include "ops/cpu/with_best.hpp"

namespace stepgraph::cpu {
namespace {

template <class T, class Param>
void forward(const Norm<T, Param>& norm, std::int64_t begin_row, std::int64_t end_row) {
  using W                  = Wide<T>;
  const std::int64_t width = norm.width;
  for (std::int64_t row = begin_row; row < end_row; ++row) {
    const T* __restrict x          = norm.x + row * width;
    T* __restrict y                = norm.y + row * width;
    const Param* __restrict weight = norm.weight;
    const Param* __restrict bias   = norm.bias;
    W center                       = 0;
    if (norm.center != nullptr) {
      center = static_cast<W>(lane_sum<double>(width, [x](std::int64_t i) { return static_cast<double>(wide(x[i])); }) /
                              static_cast<double>(width));
      norm.center[row] = center;
    }
    // Sums the squares of deviations from the mean, which avoids cancellation. The mean is rounded, so the deviations
    // do not sum to exactly 0; this affects at most the last bit of the variance.
    const double squares     = block_sum<W>(width, [x, center](std::int64_t i) {
      const W deviation = wide(x[i]) - center;
      return deviation * deviation;
    });
    const double mean_square = squares / static_cast<double>(width);
    // If the squares overflow, the scale would be 0. Adding 0 * infinity makes it NaN instead.
    const auto scale = static_cast<W>(1 / std::sqrt(mean_square + norm.eps) + 0 * mean_square);
    norm.scale[row]  = scale;
    if (norm.center != nullptr) {
      for (std::int64_t i = 0; i < width; ++i)
        y[i] = narrow<T>((wide(x[i]) - center) * scale * wide(weight[i]) + wide(bias[i]));
    } else {
      for (std::int64_t i = 0; i < width; ++i) y[i] = narrow<T>(wide(x[i]) * scale * wide(weight[i]));
    }
  }
}

// With n = (x - center) * scale and g = dy * weight: dx = scale * (g - mean(g) - n * mean(g n)). The RMS norm has no
// mean(g).
template <class T, class Param>
void backward(const NormBackward<T, Param>& norm, const Into<T>& dx, std::int64_t begin_row, std::int64_t end_row) {
  using W                  = Wide<T>;
  const std::int64_t width = norm.width;
  const Param* weight      = norm.weight;
  for (std::int64_t row = begin_row; row < end_row; ++row) {
    const T *x = norm.x + row * width, *dy = norm.dy + row * width;
    const W scale = norm.scale[row], center = norm.center == nullptr ? W(0) : norm.center[row];
    const TwoSums sums    = block_sums<W>(width, [=](std::int64_t i) {
      const W g = wide(dy[i]) * wide(weight[i]);
      return TwoParts<W>{g * ((wide(x[i]) - center) * scale), g};
    });
    const auto mean_of_gn = static_cast<W>(sums.first / static_cast<double>(width)),
               mean_of_g  = norm.center == nullptr ? W(0) : static_cast<W>(sums.second / static_cast<double>(width));
    put(dx, row * width, width, [=](std::int64_t i) {
      return scale * (wide(dy[i]) * wide(weight[i]) - mean_of_g - (wide(x[i]) - center) * scale * mean_of_gn);
    });
  }
}

template <class T, class Param>
void weight_gradient(const NormBackward<T, Param>& norm, const Into<T, Wide<T>>& dw, const Into<T, Wide<T>>* db,
                     std::int64_t rows, std::int64_t begin, std::int64_t end) {
  using W                 = Wide<T>;
  const std::int64_t size = end - begin;
  ColumnParts<W> of_weight;
  of_weight.add_rows(rows, size, [&](std::int64_t row) {
    const T *x = norm.x + row * norm.width + begin, *dy = norm.dy + row * norm.width + begin;
    const W scale = norm.scale[row], center = norm.center == nullptr ? W(0) : norm.center[row];
    return [=](std::int64_t c) { return wide(dy[c]) * ((wide(x[c]) - center) * scale); };
  });
  put(dw, begin, size, [&](std::int64_t c) { return static_cast<W>(of_weight.sums[c]); });
  if (db == nullptr) return;
  ColumnParts<W> of_bias;
  of_bias.add_rows(rows, size, [&](std::int64_t row) {
    return [dy = norm.dy + row * norm.width + begin](std::int64_t c) { return wide(dy[c]); };
  });
  put(*db, begin, size, [&](std::int64_t c) { return static_cast<W>(of_bias.sums[c]); });
}

}  // namespace

template <class T, class Param>
void norm_forward(const Norm<T, Param>& norm, std::int64_t begin_row, std::int64_t end_row) {
  with_best([&] { forward(norm, begin_row, end_row); });
}
template <class T, class Param>
void norm_backward(const NormBackward<T, Param>& norm, const Into<T>& dx, std::int64_t begin_row,
                   std::int64_t end_row) {
  with_best([&] { backward(norm, dx, begin_row, end_row); });
}
template <class T, class Param>
void norm_weight_gradient(const NormBackward<T, Param>& norm, const Into<T, Wide<T>>& dw, const Into<T, Wide<T>>* db,
                          std::int64_t rows, std::int64_t begin, std::int64_t end) {
  with_best([&] { weight_gradient(norm, dw, db, rows, begin, end); });
}

#define STEPGRAPH_NORM(T, Param)                                                                                      \
  template void norm_forward(const Norm<T, Param>&, std::int64_t, std::int64_t);                                      \
  template void norm_backward(const NormBackward<T, Param>&, const Into<T>&, std::int64_t, std::int64_t);             \
  template void norm_weight_gradient(const NormBackward<T, Param>&, const Into<T, Wide<T>>&, const Into<T, Wide<T>>*, \
                                     std::int64_t, std::int64_t, std::int64_t)
STEPGRAPH_NORM(float, float);
STEPGRAPH_NORM(double, double);
STEPGRAPH_NORM(bf16, bf16);
STEPGRAPH_NORM(bf16, float);
STEPGRAPH_NORM(f16, f16);
STEPGRAPH_NORM(f16, float);
#undef STEPGRAPH_NORM

}  // namespace stepgraph::cpu
