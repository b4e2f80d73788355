#include "ops/cpu/rotary_embedding.hpp"

#include <algorithm>
#include <cmath>

#include "ops/cpu/with_best.hpp"
#include "ops/tape/number.hpp"

namespace stepgraph::cpu {
namespace {

// A table of all positions would be as large as an activation, per node. Instead, the angles of a row are those of the
// previous row, rotated once more. In f64 this loses less than 2^-50 until the angles are recomputed.
template <class T>
void turn(const Rotation& rotation, std::int64_t rows, const T* in, T* out, double* angles) {
  constexpr std::int64_t rows_between_anew = 32;
  const std::int64_t half                  = rotation.head_size / 2;
  double *cosines = angles, *sines = cosines + half, *step_cosines = sines + half, *step_sines = step_cosines + half;
  const double direction = rotation.backward ? -1 : 1;
  const auto set         = [&](double* to_cosines, double* to_sines, double position) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = position * (*rotation.frequencies)[static_cast<std::size_t>(i)];
      to_cosines[i]      = std::cos(angle);
      to_sines[i]        = direction * std::sin(angle);
    }
  };
  set(step_cosines, step_sines, 1);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t position = row % rotation.seq;
    if (position % rows_between_anew == 0) {
      set(cosines, sines, static_cast<double>(position));
    } else {
      for (std::int64_t i = 0; i < half; ++i) {
        const double c = cosines[i], s = sines[i];
        cosines[i] = c * step_cosines[i] - s * step_sines[i];
        sines[i]   = s * step_cosines[i] + c * step_sines[i];
      }
    }
    const T* from = in + row * rotation.row;
    T* to         = out + row * rotation.row;
    for (std::int64_t head = 0; head < rotation.turned_heads; ++head) {
      const T* x = from + head * rotation.head_size;
      T* y       = to + head * rotation.head_size;
      for (std::int64_t i = 0; i < half; ++i) {
        const auto c = static_cast<Wide<T>>(cosines[i]), s = static_cast<Wide<T>>(sines[i]);
        const Wide<T> first = wide(x[i]), second = wide(x[i + half]);
        y[i]        = narrow<T>(first * c - second * s);
        y[i + half] = narrow<T>(second * c + first * s);
      }
    }
    const std::int64_t turned = rotation.turned_heads * rotation.head_size;
    if (from != to) std::copy(from + turned, from + rotation.row, to + turned);
  }
}

}  // namespace

template <class T>
void rotate(const Rotation& rotation, std::int64_t rows, const T* in, T* out, double* angles) {
  with_best([&] { turn(rotation, rows, in, out, angles); });
}

template void rotate<float>(const Rotation&, std::int64_t, const float*, float*, double*);
template void rotate<bf16>(const Rotation&, std::int64_t, const bf16*, bf16*, double*);
template void rotate<f16>(const Rotation&, std::int64_t, const f16*, f16*, double*);
template void rotate<double>(const Rotation&, std::int64_t, const double*, double*, double*);

}  // namespace stepgraph::cpu
