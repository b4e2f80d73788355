#include "ops/cuda/layers/norm.hpp"

#include "ops/cuda/common/drop.cuh"
#include "ops/cuda/layers/norm_rows.cuh"

namespace stepgraph::cuda {
namespace {

template <class N, class P>
struct NormRows {
  std::int64_t rows;
  int width;
  const N* x;
  const P *weight, *bias;
  Computed<N>*center, *scale;
  N* y;
  double eps;

  __device__ bool centered() const { return center != nullptr; }
  __device__ RowSum<N> mean(RowSum<N> sum) const { return sum / static_cast<RowSum<N>>(width); }
  // If the squares overflow, the scale would be 0. Adding 0 * infinity makes it NaN instead.
  __device__ Computed<N> scale_of(RowSum<N> squares) const {
    const RowSum<N> mean_square = mean(squares);
    return static_cast<Computed<N>>(1 / sqrt(mean_square + static_cast<RowSum<N>>(eps)) + 0 * mean_square);
  }
  // Stores center and scale of a row. Called by one of its threads.
  __device__ void keep(std::int64_t row, Computed<N> row_center, Computed<N> row_scale) const {
    scale[row] = row_scale;
    if (centered()) center[row] = row_center;
  }
  template <int n>
  __device__ void put(std::int64_t row, int column, const Computed<N>* values, Computed<N> row_center,
                      Computed<N> row_scale) const {
    const Pack<P, n> by = load_pack<n>(weight + column);
    Pack<N, n> to;
    if (centered()) {
      const Pack<P, n> moved = load_pack<n>(bias + column);
#pragma unroll
      for (int k = 0; k < n; ++k) {
        to.at[k] = narrow_to<N>((values[k] - row_center) * row_scale * static_cast<Computed<N>>(widen(by.at[k])) +
                                static_cast<Computed<N>>(widen(moved.at[k])));
      }
    } else {
#pragma unroll
      for (int k = 0; k < n; ++k) {
        to.at[k] = narrow_to<N>(values[k] * row_scale * static_cast<Computed<N>>(widen(by.at[k])));
      }
    }
    store_pack<n>(y + row * width + column, to);
  }
};

// Source of rows that are in memory already.
template <class N>
struct Given {
  template <int n>
  using Loaded = Pack<N, n>;
  template <int n>
  __device__ Loaded<n> load(const N* x, std::int64_t at) const {
    return load_pack<n>(x + at);
  }
  template <int n>
  __device__ void finish(const Loaded<n>& in, std::int64_t, int, Computed<N>* values) const {
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = widen(in.at[k]);
  }
};
// Source of rows that are summed and stored first.
template <class N, class D>
struct Summed {
  const N *x, *branch, *bias;
  N* y;
  D drop;
  template <int n>
  struct Loaded {
    Pack<N, n> x, branch;
  };
  template <int n>
  __device__ Loaded<n> load(const N*, std::int64_t at) const {
    return {load_pack<n>(x + at), load_pack<n>(branch + at)};
  }
  template <int n>
  __device__ void finish(const Loaded<n>& in, std::int64_t at, int column, Computed<N>* values) const {
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = widen(in.branch.at[k]);
    if (bias != nullptr) {  // cached: all rows share it
      const Pack<N, n> added = load_pack<n>(bias + column);
#pragma unroll
      for (int k = 0; k < n; ++k) values[k] += widen(added.at[k]);
    }
    drop_values<n>(drop, at, values);
    Pack<N, n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      to.at[k]  = narrow_to<N>(widen(in.x.at[k]) + values[k]);
      values[k] = widen(to.at[k]);
    }
    store_pack<n>(y + at, to);
  }
};

// Each row is read once and stays in registers.
template <class Shape, class N, class P, class From>
__global__ void __launch_bounds__(Shape::block_threads) norm_kernel(const NormRows<N, P> norm, const From from) {
  constexpr int n = elements_per_vector<N>, packs = Shape::packs;
  using W = Computed<N>;
  __shared__ RowSum<N> of_sum[1][32], of_squares[1][32];
  const std::int64_t row = Shape::row();
  if (row >= norm.rows) return;  // all threads of the row

  W values[packs][n] = {};
  typename From::template Loaded<n> loaded[packs];
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    const int column = Shape::column(k, n);
    if (column < norm.width) loaded[k] = from.template load<n>(norm.x, row * norm.width + column);
  }
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    const int column = Shape::column(k, n);
    if (column < norm.width) from.template finish<n>(loaded[k], row * norm.width + column, column, values[k]);
  }

  W center = 0;
  if (norm.centered()) {
    W sum = 0;
#pragma unroll
    for (int k = 0; k < packs; ++k) {
#pragma unroll
      for (int i = 0; i < n; ++i) sum += values[k][i];
    }
    RowSum<N> total[1] = {sum};
    add_up<Shape::threads>(total, of_sum);
    center = static_cast<W>(norm.mean(total[0]));
  }
  W squares = 0;
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    if (Shape::column(k, n) >= norm.width) continue;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const W deviation = values[k][i] - center;
      squares += deviation * deviation;
    }
  }
  RowSum<N> total[1] = {squares};
  add_up<Shape::threads>(total, of_squares);
  const W scale = norm.scale_of(total[0]);

  if (threadIdx.x == 0) norm.keep(row, center, scale);
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    const int column = Shape::column(k, n);
    if (column < norm.width) norm.template put<n>(row, column, values[k], center, scale);
  }
}

// Rows of any length, element by element, in several passes. Each thread rereads only what it has stored itself.
constexpr int any_threads = 256;
template <class N, class P, class From>
__global__ void __launch_bounds__(any_threads) norm_any_kernel(const NormRows<N, P> norm, const From from) {
  using W = Computed<N>;
  __shared__ RowSum<N> of_sum[1][32], of_squares[1][32];
  const std::int64_t row = blockIdx.x, first = row * norm.width;

  RowSum<N> sum[1] = {0};
  for (int column = threadIdx.x; column < norm.width; column += any_threads) {
    W value[1];
    from.template finish<1>(from.template load<1>(norm.x, first + column), first + column, column, value);
    sum[0] += static_cast<RowSum<N>>(value[0]);
  }
  W center = 0;
  if (norm.centered()) {
    add_up<any_threads>(sum, of_sum);
    center = static_cast<W>(norm.mean(sum[0]));
  }
  RowSum<N> squares[1] = {0};
  for (int column = threadIdx.x; column < norm.width; column += any_threads) {
    const W deviation = widen(norm.x[first + column]) - center;
    squares[0] += static_cast<RowSum<N>>(deviation * deviation);
  }
  add_up<any_threads>(squares, of_squares);
  const W scale = norm.scale_of(squares[0]);

  if (threadIdx.x == 0) norm.keep(row, center, scale);
  for (int column = threadIdx.x; column < norm.width; column += any_threads) {
    const W value[1] = {widen(norm.x[first + column])};
    norm.template put<1>(row, column, value, center, scale);
  }
}

template <class T, class Param, class From>
void launch(const DeviceQueue& queue, const char* name, const Norm<T, Param>& norm, const From& from, bool vectors) {
  if (norm.rows <= 0) return;
  constexpr int n = elements_per_vector<T>;
  const NormRows<Native<T>, Native<Param>> rows{norm.rows,         static_cast<int>(norm.width),
                                                native(norm.x),    native(norm.weight),
                                                native(norm.bias), norm.center,
                                                norm.scale,        native(norm.y),
                                                norm.eps};
  const bool fits = vectors && norm.width % n == 0 && vectors_fit(norm.x, norm.weight, norm.bias, norm.y);
  const bool done =
      fits && with_row_shape(norm.width / n, [&]<class Shape>(Shape) {
        norm_kernel<Shape><<<blocks_for(norm.rows, Shape::rows_per_block), dim3(Shape::threads, Shape::rows_per_block),
                             0, stream_of(queue)>>>(rows, from);
      });
  if (!done) norm_any_kernel<<<blocks_for(norm.rows, 1), any_threads, 0, stream_of(queue)>>>(rows, from);
  check_launch(name);
}

}  // namespace

template <class T, class Param>
void norm_forward(const DeviceQueue& queue, const Norm<T, Param>& norm) {
  launch(queue, "norm", norm, Given<Native<T>>{}, true);
}

template <class T, class Param>
void residual_norm_forward(const DeviceQueue& queue, const ResidualRows<T>& sum, const Norm<T, Param>& norm) {
  with_drop(sum.drop, [&]<class D>(const D& drop) {
    const Summed<Native<T>, D> from{native(sum.x), native(sum.branch), native(sum.bias), native(sum.y), drop};
    launch(queue, "residual_norm", norm, from, vectors_fit(sum.x, sum.branch, sum.bias));
  });
}

#define STEPGRAPH_NORM(T, Param)                                         \
  template void norm_forward(const DeviceQueue&, const Norm<T, Param>&); \
  template void residual_norm_forward(const DeviceQueue&, const ResidualRows<T>&, const Norm<T, Param>&)
STEPGRAPH_NORM(float, float);
STEPGRAPH_NORM(double, double);
STEPGRAPH_NORM(bf16, bf16);
STEPGRAPH_NORM(bf16, float);
STEPGRAPH_NORM(f16, f16);
STEPGRAPH_NORM(f16, float);
#undef STEPGRAPH_NORM

}  // namespace stepgraph::cuda
