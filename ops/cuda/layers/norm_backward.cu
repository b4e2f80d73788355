#include "ops/cuda/layers/column_sum.cuh"
#include "ops/cuda/layers/norm.hpp"
#include "ops/cuda/layers/norm_rows.cuh"

namespace stepgraph::cuda {
namespace {

// With m = (x - center) * scale and g = dy * weight: dx = scale * (g - mean(g) - m * mean(g m)). The RMS norm has no
// mean(g).
template <class N, class P>
struct BackwardRows {
  using W = Computed<N>;
  std::int64_t rows;
  int width;
  const N* x;
  const P* weight;
  const W *center, *scale;
  const N* dy;
  Sum<N> dx;

  struct Row {
    W center, scale;
  };
  __device__ Row row(std::int64_t at) const { return {center == nullptr ? W(0) : center[at], scale[at]}; }
  // Adds g m and g of n elements.
  template <int n>
  __device__ void add(const Row& of, int column, const Pack<N, n>& from, const Pack<N, n>& above, W (&sums)[2]) const {
    const Pack<P, n> by = load_pack<n>(weight + column);
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const W g = widen(above.at[k]) * static_cast<W>(widen(by.at[k]));
      sums[0] += g * ((widen(from.at[k]) - of.center) * of.scale);
      sums[1] += g;
    }
  }
  // Means of g m and of g, from sums over the row.
  __device__ void divide(const RowSum<N> (&sums)[2], W (&means)[2]) const {
    means[0] = static_cast<W>(sums[0] / static_cast<RowSum<N>>(width));
    means[1] = center == nullptr ? W(0) : static_cast<W>(sums[1] / static_cast<RowSum<N>>(width));
  }
  template <int n>
  __device__ void put(const Row& of, std::int64_t at, int column, const Pack<N, n>& from, const Pack<N, n>& above,
                      const Pack<N, n>& was, const W (&means)[2]) const {
    const Pack<P, n> by = load_pack<n>(weight + column);
    W values[n];
#pragma unroll
    for (int k = 0; k < n; ++k) {
      values[k] = of.scale * (widen(above.at[k]) * static_cast<W>(widen(by.at[k])) - means[1] -
                              (widen(from.at[k]) - of.center) * of.scale * means[0]);
    }
    dx.template put<n>(at, was, values);
  }
};

template <class Shape, class N, class P>
__global__ void __launch_bounds__(Shape::block_threads) norm_backward_kernel(const BackwardRows<N, P> norm) {
  constexpr int n = elements_per_vector<N>, packs = Shape::packs;
  using W = Computed<N>;
  __shared__ RowSum<N> shared[2][32];
  const std::int64_t row = Shape::row();
  if (row >= norm.rows) return;  // all threads of the row
  const std::int64_t first = row * norm.width;

  Pack<N, n> x[packs], dy[packs], was[packs];
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    const int column = Shape::column(k, n);
    if (column >= norm.width) continue;
    x[k]   = load_pack<n>(norm.x + first + column);
    dy[k]  = load_pack<n>(norm.dy + first + column);
    was[k] = norm.dx.template before<n>(first + column);
  }
  const auto of = norm.row(row);
  W parts[2]    = {0, 0};
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    const int column = Shape::column(k, n);
    if (column < norm.width) norm.template add<n>(of, column, x[k], dy[k], parts);
  }
  RowSum<N> sums[2] = {parts[0], parts[1]};
  add_up<Shape::threads>(sums, shared);
  W means[2];
  norm.divide(sums, means);
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    const int column = Shape::column(k, n);
    if (column < norm.width) norm.template put<n>(of, first + column, column, x[k], dy[k], was[k], means);
  }
}

// Rows of any length, element by element, in two passes.
constexpr int any_threads = 256;
template <class N, class P>
__global__ void __launch_bounds__(any_threads) norm_backward_any_kernel(const BackwardRows<N, P> norm) {
  using W = Computed<N>;
  __shared__ RowSum<N> shared[2][32];
  const std::int64_t row = blockIdx.x, first = row * norm.width;
  const auto of     = norm.row(row);
  RowSum<N> sums[2] = {0, 0};
  for (int column = threadIdx.x; column < norm.width; column += any_threads) {
    W parts[2] = {0, 0};
    norm.template add<1>(of, column, load_pack<1>(norm.x + first + column), load_pack<1>(norm.dy + first + column),
                         parts);
    sums[0] += static_cast<RowSum<N>>(parts[0]);
    sums[1] += static_cast<RowSum<N>>(parts[1]);
  }
  add_up<any_threads>(sums, shared);
  W means[2];
  norm.divide(sums, means);
  for (int column = threadIdx.x; column < norm.width; column += any_threads) {
    const std::int64_t at = first + column;
    norm.template put<1>(of, at, column, load_pack<1>(norm.x + at), load_pack<1>(norm.dy + at),
                         norm.dx.template before<1>(at), means);
  }
}

// Sums of dy times the normalised x and, for a layer norm, of dy.
template <class N, bool centered>
struct WeightColumns {
  using Element                 = N;
  using W                       = Computed<N>;
  static constexpr int num_sums = centered ? 2 : 1, rows_at_once = norm_rows_at_once;
  const N *x, *dy;
  const W *center, *scale;
  std::int64_t width;
  template <int n>
  struct Loaded {
    Pack<N, n> x, dy;
    W center, scale;
  };
  template <int n>
  __device__ Loaded<n> load(std::int64_t row, std::int64_t column) const {
    return {load_pack<n>(x + row * width + column), load_pack<n>(dy + row * width + column),
            centered ? center[row] : W(0), scale[row]};
  }
  template <int n>
  __device__ void add(const Loaded<n>& in, std::int64_t, std::int64_t, W (&sums)[num_sums][n]) const {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const W above = widen(in.dy.at[k]);
      sums[0][k] += above * ((widen(in.x.at[k]) - in.center) * in.scale);
      if constexpr (centered) sums[1][k] += above;
    }
  }
};

}  // namespace

template <class T, class Param>
void norm_backward(const DeviceQueue& queue, const NormBackward<T, Param>& norm, const Into<T>& dx) {
  if (norm.rows <= 0) return;
  constexpr int n = elements_per_vector<T>;
  const BackwardRows<Native<T>, Native<Param>> rows{norm.rows,       static_cast<int>(norm.width),
                                                    native(norm.x),  native(norm.weight),
                                                    norm.center,     norm.scale,
                                                    native(norm.dy), sum_of(dx)};
  const bool fits = norm.width % n == 0 && vectors_fit(norm.x, norm.weight, norm.dy, dx.out, dx.base);
  const bool done =
      fits && with_row_shape(norm.width / n, [&]<class Shape>(Shape) {
        norm_backward_kernel<Shape><<<blocks_for(norm.rows, Shape::rows_per_block),
                                      dim3(Shape::threads, Shape::rows_per_block), 0, stream_of(queue)>>>(rows);
      });
  if (!done) norm_backward_any_kernel<<<blocks_for(norm.rows, 1), any_threads, 0, stream_of(queue)>>>(rows);
  check_launch("norm_backward");
}

template <class T, class Param>
void norm_weight_gradient(const DeviceQueue& queue, const NormBackward<T, Param>& norm, const Into<T, Wide<T>>& dw,
                          const Into<T, Wide<T>>* db) {
  const bool vectors = norm.width % elements_per_vector<T> == 0 && vectors_fit(norm.x, norm.dy);
  const char* name   = "norm_weight_gradient";
  if (db == nullptr) {
    sum_columns(queue, name,
                WeightColumns<Native<T>, false>{native(norm.x), native(norm.dy), nullptr, norm.scale, norm.width},
                norm.rows, norm.width, vectors, std::array{sum_of(dw)});
  } else {
    sum_columns(queue, name,
                WeightColumns<Native<T>, true>{native(norm.x), native(norm.dy), norm.center, norm.scale, norm.width},
                norm.rows, norm.width, vectors, std::array{sum_of(dw), sum_of(*db)});
  }
}

#define STEPGRAPH_NORM(T, Param)                                                                                 \
  template void norm_backward(const DeviceQueue&, const NormBackward<T, Param>&, const Into<T>&);                \
  template void norm_weight_gradient(const DeviceQueue&, const NormBackward<T, Param>&, const Into<T, Wide<T>>&, \
                                     const Into<T, Wide<T>>*)
STEPGRAPH_NORM(float, float);
STEPGRAPH_NORM(double, double);
STEPGRAPH_NORM(bf16, bf16);
STEPGRAPH_NORM(bf16, float);
STEPGRAPH_NORM(f16, f16);
STEPGRAPH_NORM(f16, float);
#undef STEPGRAPH_NORM

}  // namespace stepgraph::cuda
