#include "ops/cuda/layers/column_sum.hpp"

#include "ops/cuda/common/drop.cuh"
#include "ops/cuda/layers/column_sum.cuh"

namespace stepgraph::cuda {
namespace {

template <class N, class D>
struct DroppedRows {
  using Element                     = N;
  static constexpr int num_sums     = 1,
                       rows_at_once = std::is_same_v<D, NoDrop> ? column_rows_at_once : dropped_rows_at_once;
  const N* dy;
  std::int64_t width;
  D drop;
  template <int n>
  using Loaded = Pack<N, n>;
  template <int n>
  __device__ Loaded<n> load(std::int64_t row, std::int64_t column) const {
    return load_pack<n>(dy + row * width + column);
  }
  template <int n>
  __device__ void add(const Loaded<n>& in, std::int64_t row, std::int64_t column, Computed<N> (&sums)[1][n]) const {
    Computed<N> values[n];
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = widen(in.at[k]);
    drop_values<n>(drop, row * width + column, values);
#pragma unroll
    for (int k = 0; k < n; ++k) sums[0][k] += values[k];
  }
};

}  // namespace

template <class T>
void column_sum(const DeviceQueue& queue, const T* dy, std::int64_t rows, std::int64_t width,
                const std::optional<Drop>& drop, const Into<T, Wide<T>>& into) {
  with_drop(drop, [&]<class D>(const D& each) {
    sum_columns(queue, "column_sum", DroppedRows<Native<T>, D>{native(dy), width, each}, rows, width,
                vectors_fit(dy) && width % elements_per_vector<T> == 0, std::array{sum_of(into)});
  });
}

#define STEPGRAPH_COLUMN_SUM(T)                                                                                  \
  template void column_sum(const DeviceQueue&, const T*, std::int64_t, std::int64_t, const std::optional<Drop>&, \
                           const Into<T, Wide<T>>&)
STEPGRAPH_COLUMN_SUM(float);
STEPGRAPH_COLUMN_SUM(double);
STEPGRAPH_COLUMN_SUM(bf16);
STEPGRAPH_COLUMN_SUM(f16);
#undef STEPGRAPH_COLUMN_SUM

}  // namespace stepgraph::cuda
