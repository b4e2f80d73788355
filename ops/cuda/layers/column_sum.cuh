#pragma once
#include <algorithm>
#include <array>

#include "ops/cuda/common/pack.cuh"
#include "ops/cuda/common/workspace.cuh"

// Sums over rows in two steps: each thread block sums a block of rows; the last block to finish adds those sums.
// Internal to ops/cuda/.
//
// The summed values come from a source. It has an element type `Element` (N), a number of sums per column (`num_sums`),
// and the number of rows that a warp loads together (`rows_at_once`). `load<n>(row, column)` loads the data of n
// columns, a `Loaded<n>`; `add(loaded, row, column, sums)` adds it to Computed<N> sums[num_sums][n].
namespace stepgraph::cuda {

inline constexpr int sum_threads = sum_lanes * sum_warps;
inline constexpr int sum_groups  = 8;  // of threads, among which the second step divides its rows

// The destination of each sum.
template <class W, int num_sums>
struct ColumnSums {
  Sum<W> into[num_sums];
};

// The partial sums of blocks of rows: [num_sums][gridDim.y][width].
template <class W>
struct ColumnParts {
  std::int64_t rows_per_block;
  W* sums;
  std::int64_t first_tile;  // first tile of columns; blockIdx.x counts from there
  unsigned* counters;       // of finished blocks, per blockIdx.x: 0 before and after

  __device__ W* at(int sum, unsigned part, std::int64_t width) const {
    return sums + (static_cast<std::int64_t>(sum) * gridDim.y + part) * width;
  }
  // Whether this block is the last one of its columns to finish. It then sees the stores of all others.
  __device__ bool last() const {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
      is_last = atomicAdd(counters + blockIdx.x, 1u) + 1 == gridDim.y;
      if (is_last) counters[blockIdx.x] = 0;
    }
    __syncthreads();
    __threadfence();
    return is_last;
  }
};

// Bypasses the L1 cache, which does not see the stores of other blocks.
template <int n, class W>
__device__ Pack<W, n> load_fresh(const W* from) {
  Pack<W, n> pack;
  if constexpr (sizeof(pack) == vector_bytes) {
    const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(from));
    __builtin_memcpy(&pack, &bits, sizeof(bits));
  } else {
    static_assert(n == 1);
    pack.at[0] = __ldcg(from);
  }
  return pack;
}

// Adds a warp's rows from `row` on, loading `at_once` at a time, then the rest in smaller steps. Rows are always added
// in order.
template <int at_once, int n, class Source, class W>
__device__ void add_rows(const Source& source, std::int64_t& row, std::int64_t end, std::int64_t column,
                         W (&sums)[Source::num_sums][n]) {
  for (; row + (at_once - 1) * sum_warps < end; row += at_once * sum_warps) {
    typename Source::template Loaded<n> loaded[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) loaded[k] = source.template load<n>(row + k * sum_warps, column);
#pragma unroll
    for (int k = 0; k < at_once; ++k) source.template add<n>(loaded[k], row + k * sum_warps, column, sums);
  }
  if constexpr (at_once > 1) add_rows<at_once / 2, n>(source, row, end, column, sums);
}

template <int n, class Source, class W = Computed<typename Source::Element>>
__global__ void __launch_bounds__(sum_threads, 2)
    column_sums(const Source source, std::int64_t rows, std::int64_t width, const ColumnParts<W> parts,
                const ColumnSums<W, Source::num_sums> to) {
  constexpr int num_sums = Source::num_sums, columns = sum_lanes * n;
  constexpr int m = n == 1 ? 1 : elements_per_vector<W>;  // columns per thread in the second step
  static_assert(columns / m * sum_groups <= sum_threads);
  __shared__ union {
    W of_warps[sum_warps][columns];
    double of_groups[sum_groups][columns];
  } shared;
  const int thread                = static_cast<int>(threadIdx.y) * sum_lanes + static_cast<int>(threadIdx.x);
  const std::int64_t first_column = (parts.first_tile + blockIdx.x) * columns;
  const std::int64_t column       = first_column + threadIdx.x * n;
  const std::int64_t end          = min(rows, (blockIdx.y + std::int64_t{1}) * parts.rows_per_block);

  W sums[num_sums][n] = {};
  if (column < width) {
    std::int64_t row = blockIdx.y * parts.rows_per_block + threadIdx.y;
    add_rows<Source::rows_at_once, n>(source, row, end, column, sums);
  }
#pragma unroll
  for (int s = 0; s < num_sums; ++s) {
    if (s > 0) __syncthreads();
#pragma unroll
    for (int k = 0; k < n; ++k) shared.of_warps[threadIdx.y][threadIdx.x * n + k] = sums[s][k];
    __syncthreads();
    for (int c = thread; c < columns; c += sum_threads) {
      if (first_column + c >= width) break;
      W sum = shared.of_warps[0][c];
#pragma unroll
      for (int warp = 1; warp < sum_warps; ++warp) sum += shared.of_warps[warp][c];
      parts.at(s, blockIdx.y, width)[first_column + c] = sum;
    }
  }

  if (!parts.last()) return;
  const int group = thread / (columns / m), from = thread % (columns / m) * m;
  for (int s = 0; s < num_sums; ++s) {
    double sum[m] = {};
    if (group < sum_groups && first_column + from < width) {
#pragma unroll 8
      for (unsigned part = group; part < gridDim.y; part += sum_groups) {
        const Pack<W, m> each = load_fresh<m>(parts.at(s, part, width) + first_column + from);
#pragma unroll
        for (int k = 0; k < m; ++k) sum[k] += static_cast<double>(each.at[k]);
      }
    }
    if (s > 0) __syncthreads();
    if (group < sum_groups) {
#pragma unroll
      for (int k = 0; k < m; ++k) shared.of_groups[group][from + k] = sum[k];
    }
    __syncthreads();
    for (int c = thread; c < columns; c += sum_threads) {
      if (first_column + c >= width) break;
      double all = shared.of_groups[0][c];
#pragma unroll
      for (int each = 1; each < sum_groups; ++each) all += shared.of_groups[each][c];
      const Sum<W>& into = to.into[s];
      const auto value   = static_cast<W>(all);
      into.template put<1>(first_column + c, into.template before<1>(first_column + c), &value);
    }
  }
}

// `vectors`: rows are aligned and consist of whole vectors.
template <class Source, class W = Computed<typename Source::Element>>
void sum_columns(const DeviceQueue& queue, const char* name, const Source& source, std::int64_t rows,
                 std::int64_t width, bool vectors, const std::array<Sum<W>, Source::num_sums>& into) {
  if (width <= 0) return;
  constexpr int n = elements_per_vector<typename Source::Element>, num_sums = Source::num_sums;
  const ColumnBlocks blocks_of_rows =
      column_blocks(rows, width, sizeof(typename Source::Element), Source::rows_at_once);
  const std::int64_t of_each = blocks_of_rows.rows_per_block, parts = blocks_of_rows.num_blocks;

  Workspace workspace(queue, name);
  W* const sums = workspace.take<W>(num_sums * parts * width);
  if (queue.counters.empty()) throw Error(ErrorKind::backend, str("cuda: ", name, " needs counters (a compute lane)"));
  ColumnSums<W, num_sums> to;
  std::copy(into.begin(), into.end(), to.into);
  const auto launch = [&]<int size>(std::integral_constant<int, size>) {
    const auto all     = static_cast<std::int64_t>(blocks_for(width, sum_lanes * size)),
               at_once = std::ssize(queue.counters);
    for (std::int64_t tile = 0; tile < all; tile += at_once) {
      const dim3 blocks(static_cast<unsigned>(std::min(at_once, all - tile)), static_cast<unsigned>(parts));
      column_sums<size><<<blocks, dim3(sum_lanes, sum_warps), 0, stream_of(queue)>>>(
          source, rows, width, ColumnParts<W>{of_each, sums, tile, queue.counters.data()}, to);
      check_launch(name);
    }
  };
  if (vectors) {
    launch(std::integral_constant<int, n>());
  } else {
    launch(std::integral_constant<int, 1>());
  }
}

}  // namespace stepgraph::cuda
