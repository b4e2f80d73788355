#include "ops/cuda/layers/embedding.hpp"

#include "ops/cuda/common/map.cuh"

namespace stepgraph::cuda {
namespace {

template <class N>
struct Lookup {
  const std::int32_t* tokens;
  TableRows rows;
  std::int64_t width;
  const N* table;
  N* y;
  template <int n>
  using Loaded = Pack<N, n>;
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    const auto [position, column] = split(i, width);
    const std::int64_t row        = tokens[position] - rows.begin;
    return row < 0 || row >= rows.size ? Pack<N, n>{} : load_pack<n>(table + row * width + column);
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    store_pack<n>(y + i, in);
  }
};

template <class N>
struct AddPositions {
  Positions positions;
  std::int64_t width;
  const N *x, *table;
  N* y;
  template <int n>
  struct Loaded {
    Pack<N, n> x, row;
    bool has_row;
  };
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    const auto [row, column]    = split(i, width);
    const std::int64_t position = split(row, positions.seq).rest;
    const bool has              = position >= positions.first && position < positions.last;
    return {load_pack<n>(x + i),
            has ? load_pack<n>(table + (position - positions.first) * width + column) : Pack<N, n>{}, has};
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Pack<N, n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      to.at[k] = in.has_row ? narrow_to<N>(widen(in.x.at[k]) + widen(in.row.at[k])) : in.x.at[k];
    }
    store_pack<n>(y + i, to);
  }
};

// Elements are those of the table: a thread processes n columns of one row for all sequences.
constexpr int position_threads = 128;
template <int n, class N>
__global__ void __launch_bounds__(position_threads)
    positions_gradient_kernel(const Positions positions, std::int64_t size, std::int64_t used, std::int64_t width,
                              const N* dy, const Sum<Computed<N>> into) {
  using W              = Computed<N>;
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * position_threads + threadIdx.x) * n;
  if (i >= size) return;
  W sums[n] = {};
  if (i < used) {
    const N* from = dy + positions.first * width + i;
#pragma unroll 8
    for (std::int64_t s = 0; s < positions.sequences; ++s) {
      const Pack<N, n> more = load_pack<n>(from + s * positions.seq * width);
#pragma unroll
      for (int k = 0; k < n; ++k) sums[k] += widen(more.at[k]);
    }
  } else if (into.base == into.out) {
    return;
  }
  into.template put<n>(i, into.template before<n>(i), sums);
}

}  // namespace

template <class T>
void embedding(const DeviceQueue& queue, const std::int32_t* tokens, std::int64_t count, const TableRows& rows,
               std::int64_t width, const T* table, T* y) {
  constexpr int n = elements_per_vector<T>;
  map<n>(queue, "embedding", Lookup<Native<T>>{tokens, rows, width, native(table), native(y)}, count * width,
         width % n == 0 && vectors_fit(table, y));
}

template <class T>
void positional_embedding(const DeviceQueue& queue, const Positions& positions, std::int64_t width, const T* x,
                          const T* table, T* y) {
  constexpr int n = elements_per_vector<T>;
  map<n>(queue, "positional_embedding", AddPositions<Native<T>>{positions, width, native(x), native(table), native(y)},
         positions.sequences * positions.seq * width, width % n == 0 && vectors_fit(x, table, y));
}

template <class T>
void positional_embedding_gradient(const DeviceQueue& queue, const Positions& positions, std::int64_t rows,
                                   std::int64_t width, const T* dy, const Into<T, Wide<T>>& into) {
  const std::int64_t size = rows * width, used = (positions.last - positions.first) * width;
  if (size <= 0) return;
  const auto launch = [&]<int n>(std::integral_constant<int, n>) {
    positions_gradient_kernel<n><<<blocks_for(size, position_threads * n), position_threads, 0, stream_of(queue)>>>(
        positions, size, used, width, native(dy), sum_of(into));
  };
  constexpr int n = elements_per_vector<T>;
  if (width % n == 0 && vectors_fit(dy, into.out, into.base)) {
    launch(std::integral_constant<int, n>());
  } else {
    launch(std::integral_constant<int, 1>());
  }
  check_launch("positional_embedding_gradient");
}

#define STEPGRAPH_EMBEDDING(T)                                                                                    \
  template void embedding(const DeviceQueue&, const std::int32_t*, std::int64_t, const TableRows&, std::int64_t,  \
                          const T*, T*);                                                                          \
  template void positional_embedding(const DeviceQueue&, const Positions&, std::int64_t, const T*, const T*, T*); \
  template void positional_embedding_gradient(const DeviceQueue&, const Positions&, std::int64_t, std::int64_t,   \
                                              const T*, const Into<T, Wide<T>>&)
STEPGRAPH_EMBEDDING(float);
STEPGRAPH_EMBEDDING(double);
STEPGRAPH_EMBEDDING(bf16);
STEPGRAPH_EMBEDDING(f16);
#undef STEPGRAPH_EMBEDDING

}  // namespace stepgraph::cuda
