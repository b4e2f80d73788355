#pragma once
#include <algorithm>
#include <array>

#include "ops/cuda/pack.cuh"
#include "ops/cuda/workspace.cuh"

// Sums over rows in two steps: blocks of rows, each by a block of threads; then those. Internal to ops/cuda/.
//
// What is added up is a source:
//   using Element = N;  static constexpr int num_sums;
//   template <int n> struct Loaded;                                                      what it reads for n columns
//   template <int n> __device__ Loaded<n> load(std::int64_t row, std::int64_t column) const;
//   template <int n> __device__ void add(const Loaded<n>&, std::int64_t row, std::int64_t column,
//                                        Computed<N> (&sums)[num_sums][n]) const;
namespace stepgraph::cuda {

inline constexpr int sum_lanes = 32, sum_warps = 8;  // of a block: lanes beside each other, warps below
inline constexpr int rows_at_once = 4;               // of a warp

template <int n, class Source, class W = Computed<typename Source::Element>>
__global__ void __launch_bounds__(sum_lanes* sum_warps)
    column_parts(const Source source, std::int64_t rows, std::int64_t width, std::int64_t rows_per_block, W* parts) {
  constexpr int num_sums = Source::num_sums, columns = sum_lanes * n;
  __shared__ W shared[sum_warps][columns];
  W sums[num_sums][n] = {};

  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * columns;
  const std::int64_t column       = first_column + threadIdx.x * n;
  const std::int64_t end          = min(rows, (blockIdx.y + std::int64_t{1}) * rows_per_block);
  if (column < width) {
    for (std::int64_t row = blockIdx.y * rows_per_block + threadIdx.y; row < end; row += sum_warps * rows_at_once) {
      typename Source::template Loaded<n> loaded[rows_at_once];
#pragma unroll
      for (int k = 0; k < rows_at_once; ++k) {
        if (row + k * sum_warps < end) loaded[k] = source.template load<n>(row + k * sum_warps, column);
      }
#pragma unroll
      for (int k = 0; k < rows_at_once; ++k) {
        if (row + k * sum_warps < end) source.template add<n>(loaded[k], row + k * sum_warps, column, sums);
      }
    }
  }

#pragma unroll
  for (int s = 0; s < num_sums; ++s) {
    if (s > 0) __syncthreads();
#pragma unroll
    for (int k = 0; k < n; ++k) shared[threadIdx.y][threadIdx.x * n + k] = sums[s][k];
    __syncthreads();
    for (int c = threadIdx.y * sum_lanes + threadIdx.x; c < columns; c += sum_lanes * sum_warps) {
      if (first_column + c >= width) break;
      W sum = shared[0][c];
#pragma unroll
      for (int warp = 1; warp < sum_warps; ++warp) sum += shared[warp][c];
      parts[(static_cast<std::int64_t>(s) * gridDim.y + blockIdx.y) * width + first_column + c] = sum;
    }
  }
}

// Where each sum goes.
template <class W, int num_sums>
struct ColumnSums {
  Sum<W> into[num_sums];
};

template <class W, int num_sums>
__global__ void __launch_bounds__(sum_lanes* sum_warps)
    add_column_parts(const W* parts, std::int64_t num_parts, std::int64_t width, const ColumnSums<W, num_sums> sums) {
  __shared__ double shared[sum_warps][sum_lanes];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * sum_lanes + threadIdx.x;
  const W* const from       = parts + blockIdx.y * num_parts * width + column;
  double sum                = 0;
  if (column < width) {
#pragma unroll 4
    for (std::int64_t part = threadIdx.y; part < num_parts; part += sum_warps) {
      sum += static_cast<double>(from[part * width]);
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int warp = 1; warp < sum_warps; ++warp) sum += shared[warp][threadIdx.x];
  const Sum<W>& into = sums.into[blockIdx.y];
  const auto value   = static_cast<W>(sum);
  into.template put<1>(column, into.template before<1>(column), &value);
}

// `vectors`: rows are where vectors may be, and of whole ones.
template <class Source, class W = Computed<typename Source::Element>>
void sum_columns(const DeviceQueue& queue, const char* name, const Source& source, std::int64_t rows,
                 std::int64_t width, bool vectors, const std::array<Sum<W>, Source::num_sums>& into) {
  if (width <= 0) return;
  constexpr int n = elements_per_vector<typename Source::Element>, num_sums = Source::num_sums;
  // Blocks enough for any device, of some rows each; by shape alone, so that sums are the same wherever tensors are.
  constexpr std::int64_t blocks_wanted = 1024, least_rows = 64, step = sum_warps * rows_at_once;
  const std::int64_t tiles   = (width + sum_lanes * n - 1) / (sum_lanes * n);
  const std::int64_t most    = std::max<std::int64_t>(1, blocks_wanted / tiles);
  const std::int64_t wanted  = std::max(least_rows, (rows + most - 1) / most);
  const std::int64_t of_each = (wanted + step - 1) / step * step;
  const std::int64_t parts   = std::max<std::int64_t>(1, (rows + of_each - 1) / of_each);

  Workspace workspace(queue, name);
  W* const sums = workspace.take<W>(num_sums * parts * width);
  const dim3 threads(sum_lanes, sum_warps);
  const auto launch = [&]<int size>(std::integral_constant<int, size>) {
    const dim3 blocks(blocks_for(width, sum_lanes * size), static_cast<unsigned>(parts));
    column_parts<size><<<blocks, threads, 0, stream_of(queue)>>>(source, rows, width, of_each, sums);
  };
  if (vectors) {
    launch(std::integral_constant<int, n>());
  } else {
    launch(std::integral_constant<int, 1>());
  }
  check_launch(name);
  ColumnSums<W, num_sums> to;
  std::copy(into.begin(), into.end(), to.into);
  add_column_parts<<<dim3(blocks_for(width, sum_lanes), num_sums), threads, 0, stream_of(queue)>>>(
      static_cast<const W*>(sums), parts, width, to);
  check_launch(name);
}

}  // namespace stepgraph::cuda
