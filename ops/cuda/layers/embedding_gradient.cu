#include "ops/cuda/common/pack.cuh"
#include "ops/cuda/common/workspace.cuh"
#include "ops/cuda/layers/embedding.hpp"

// Groups tokens by row without a sort: counts the tokens of each row, gives each row a place in a list in any order,
// and inserts its tokens in any order. The bits depend only on the order of the tokens within a row, which is restored
// afterwards: by comparing all pairs for few tokens, and by a bit set for many.
namespace stepgraph::cuda {
namespace {

constexpr int threads = 256;
constexpr int few     = few_tokens;

// Counters over all rows.
struct Totals {
  int listed, sums, many, parts;
};

// One sum of up to `tokens_per_sum` tokens of a row.
struct RowSum {
  std::int32_t row, number;  // index among the row's sums
};

struct Lists {
  TableRows rows;
  std::int64_t num_tokens;
  const std::int32_t* tokens;
  int tokens_per_sum;
  Totals* totals;
  std::int32_t *counts, *begins, *first_parts;  // by row: number of tokens, their start in the list, place of its sums
  std::int32_t* list;                           // positions of tokens, grouped by row
  RowSum* sums;
  std::int32_t* many;  // rows with more than `few` tokens

  // The table's row of the token at a position; -1: not in the table.
  __device__ std::int64_t row_at(std::int64_t position) const {
    const std::int64_t row = tokens[position] - rows.begin;
    return row < 0 || row >= rows.size ? -1 : row;
  }
};

__global__ void __launch_bounds__(threads) count_rows(const Lists lists) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= lists.num_tokens) return;
  const std::int64_t row = lists.row_at(i);
  if (row >= 0) atomicAdd(&lists.counts[row], 1);
}

// Reserves `wanted` places in the counter `total` for each lane of a whole warp, with one atomic addition.
__device__ int take_place(int* total, int wanted) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int before     = wanted;  // including lower lanes
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, distance);
    if (lane >= distance) before += other;
  }
  int first = 0;
  if (lane == 31 && before > 0) first = atomicAdd(total, before);
  return __shfl_sync(0xffffffffu, first, 31) + before - wanted;
}

__global__ void __launch_bounds__(threads) place_rows(const Lists lists) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  const int count        = row < lists.rows.size ? lists.counts[row] : 0;
  const int num_sums     = (count + lists.tokens_per_sum - 1) / lists.tokens_per_sum;
  const int begin        = take_place(&lists.totals->listed, count);
  const int first_sum    = take_place(&lists.totals->sums, num_sums);
  const int place        = take_place(&lists.totals->many, count > few ? 1 : 0);
  const int first_part   = take_place(&lists.totals->parts, num_sums > 1 ? num_sums : 0);
  if (count == 0) return;
  lists.begins[row]      = begin;
  lists.first_parts[row] = first_part;
  if (count > few) lists.many[place] = static_cast<std::int32_t>(row);
  for (int k = 0; k < num_sums; ++k) lists.sums[first_sum + k] = {static_cast<std::int32_t>(row), k};
}

// `next`: by row, the number of tokens placed so far; initially zero.
__global__ void __launch_bounds__(threads) place_tokens(const Lists lists, std::int32_t* next) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= lists.num_tokens) return;
  const std::int64_t row = lists.row_at(i);
  if (row >= 0) lists.list[lists.begins[row] + atomicAdd(&next[row], 1)] = static_cast<std::int32_t>(i);
}

// Orders the tokens of rows with many of them into another list: sets one bit per position, then reads the bits in
// order, `positions_at_once` positions at a time.
constexpr int words_per_thread = 16, positions_at_once = threads * words_per_thread * 32;
__global__ void __launch_bounds__(threads) order_tokens(const Lists lists, std::int32_t* ordered) {
  __shared__ std::uint32_t bits[threads * words_per_thread];
  __shared__ int of_warps[threads / 32];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  for (int which = static_cast<int>(blockIdx.x); which < lists.totals->many; which += static_cast<int>(gridDim.x)) {
    const std::int32_t row = lists.many[which];
    const int begin = lists.begins[row], count = lists.counts[row];
    int done = 0;
    for (std::int64_t first = 0; first < lists.num_tokens; first += positions_at_once) {
      for (int w = thread; w < threads * words_per_thread; w += threads) bits[w] = 0;
      __syncthreads();
      for (int k = thread; k < count; k += threads) {
        const std::int64_t at = lists.list[begin + k] - first;
        if (at >= 0 && at < positions_at_once) atomicOr(&bits[at / 32], 1u << (at % 32));
      }
      __syncthreads();
      int own = 0;  // of a thread's words, which are consecutive
#pragma unroll
      for (int w = 0; w < words_per_thread; ++w) own += __popc(bits[thread * words_per_thread + w]);
      int before = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, distance);
        if (lane >= distance) before += other;
      }
      if (lane == 31) of_warps[warp] = before;
      __syncthreads();
      int place = done + before - own, all = 0;
      for (int w = 0; w < threads / 32; ++w) {
        if (w < warp) place += of_warps[w];
        all += of_warps[w];
      }
      for (int w = 0; w < words_per_thread; ++w) {
        const int word = thread * words_per_thread + w;
        for (std::uint32_t left = bits[word]; left != 0; left &= left - 1) {
          ordered[begin + place++] = static_cast<std::int32_t>(first + word * 32 + __ffs(static_cast<int>(left)) - 1);
        }
      }
      done += all;
      __syncthreads();
    }
  }
}

// One block per sum. The tokens of rows with few of them are ordered here, by counting the smaller positions.
template <int n, class N>
__global__ void add_tokens(const Lists lists, const std::int32_t* ordered, const N* dy, std::int64_t width,
                           Computed<N>* parts, const Sum<Computed<N>> into) {
  using W = Computed<N>;
  __shared__ std::int32_t positions[few];
  if (static_cast<int>(blockIdx.x) >= lists.totals->sums) return;
  const auto [row, number] = lists.sums[blockIdx.x];
  const int all = lists.counts[row], begin = number * lists.tokens_per_sum;
  const int count     = min(lists.tokens_per_sum, all - begin);
  const bool in_parts = all > lists.tokens_per_sum, compares = all <= few;
  const std::int32_t* const l = (compares ? lists.list : ordered) + lists.begins[row] + begin;
  if (compares && threadIdx.x < 32) {
    const std::int32_t own = static_cast<int>(threadIdx.x) < count ? l[threadIdx.x] : 0;
    int before             = 0;
    for (int k = 0; k < count; ++k) before += __shfl_sync(0xffffffffu, own, k) < own ? 1 : 0;
    if (static_cast<int>(threadIdx.x) < count) positions[before] = own;
  }
  if (compares) __syncthreads();

  const int size = static_cast<int>(width);
  for (int column = static_cast<int>(threadIdx.x) * n; column < size; column += static_cast<int>(blockDim.x) * n) {
    W sums[n]         = {};
    const auto row_of = [&](int k) {
      const std::int64_t position = compares ? positions[k] : l[k];
      return load_pack<n>(dy + position * width + column);
    };
    int k = 0;
    for (; k + 4 <= count; k += 4) {
      Pack<N, n> more[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) more[j] = row_of(k + j);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < n; ++c) sums[c] += widen(more[j].at[c]);
      }
    }
    for (; k < count; ++k) {
      const Pack<N, n> more = row_of(k);
#pragma unroll
      for (int c = 0; c < n; ++c) sums[c] += widen(more.at[c]);
    }
    if (in_parts) {
      Pack<W, n> part;
#pragma unroll
      for (int c = 0; c < n; ++c) part.at[c] = sums[c];
      store_pack<n>(parts + static_cast<std::int64_t>(lists.first_parts[row] + number) * width + column, part);
    } else {
      const std::int64_t at = static_cast<std::int64_t>(row) * width + column;
      into.template put<n>(at, into.template before<n>(at), sums);
    }
  }
}

// Adds up the sums of rows that have several, in order.
template <int n, class W>
__global__ void add_parts(const Lists lists, const W* parts, std::int64_t width, const Sum<W> into) {
  const int size = static_cast<int>(width);
  for (int which = static_cast<int>(blockIdx.x); which < lists.totals->many; which += static_cast<int>(gridDim.x)) {
    const std::int32_t row = lists.many[which];
    const int count        = (lists.counts[row] + lists.tokens_per_sum - 1) / lists.tokens_per_sum;
    if (count == 1) continue;
    for (int column = static_cast<int>(threadIdx.x) * n; column < size; column += static_cast<int>(blockDim.x) * n) {
      const W* from = parts + static_cast<std::int64_t>(lists.first_parts[row]) * width + column;
      W sums[n]     = {};
#pragma unroll 4
      for (int k = 0; k < count; ++k) {
        const Pack<W, n> more = load_pack<n>(from + k * width);
#pragma unroll
        for (int c = 0; c < n; ++c) sums[c] += more.at[c];
      }
      const std::int64_t at = static_cast<std::int64_t>(row) * width + column;
      into.template put<n>(at, into.template before<n>(at), sums);
    }
  }
}

}  // namespace

template <class T>
void embedding_gradient(const DeviceQueue& queue, const std::int32_t* tokens, std::int64_t count, const TableRows& rows,
                        std::int64_t width, const T* dy, const Into<T, Wide<T>>& into) {
  using W                   = Wide<T>;
  const cudaStream_t stream = stream_of(queue);
  if (rows.size <= 0 || width <= 0) return;
  // Rows without tokens keep the base, or become zero. All rows then have a value to add to.
  const auto bytes = static_cast<std::size_t>(rows.size * width) * sizeof(W);
  if (into.base == nullptr) {
    check_cuda(cudaMemsetAsync(into.out, 0, bytes, stream), "cudaMemsetAsync");
  } else if (into.base != into.out) {
    check_cuda(cudaMemcpyAsync(into.out, into.base, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  }
  if (count <= 0) return;
  const Sum<W> sum{into.out, into.base == nullptr ? nullptr : into.out};

  const EmbeddingSums sums = embedding_sums(count, rows.size, width, sizeof(W));
  Workspace workspace(queue, "embedding_gradient");
  // Cleared together: totals, counts, and the insert positions.
  const std::int64_t num_cleared = 4 + 2 * rows.size;
  std::int32_t* const cleared    = workspace.take<std::int32_t>(num_cleared);
  std::int32_t* const next       = cleared + 4 + rows.size;
  Lists lists{.rows           = rows,
              .num_tokens     = count,
              .tokens         = tokens,
              .tokens_per_sum = static_cast<int>(sums.tokens_per_sum),
              .totals         = reinterpret_cast<Totals*>(cleared),
              .counts         = cleared + 4,
              .begins         = workspace.take<std::int32_t>(rows.size),
              .first_parts    = workspace.take<std::int32_t>(rows.size),
              .list           = workspace.take<std::int32_t>(count),
              .sums           = nullptr,
              .many           = nullptr};
  std::int32_t* const ordered = workspace.take<std::int32_t>(count);
  const std::int64_t num_sums = sums.num_sums, most_many = sums.most_many;
  lists.sums     = workspace.take<RowSum>(num_sums);
  lists.many     = workspace.take<std::int32_t>(most_many);
  W* const parts = workspace.take<W>(sums.num_parts * width);

  const auto check = [] { check_launch("embedding_gradient"); };
  check_cuda(cudaMemsetAsync(cleared, 0, static_cast<std::size_t>(num_cleared) * sizeof(std::int32_t), stream),
             "cudaMemsetAsync");
  count_rows<<<blocks_for(count, threads), threads, 0, stream>>>(lists);
  check();
  place_rows<<<blocks_for(rows.size, threads), threads, 0, stream>>>(lists);
  check();
  place_tokens<<<blocks_for(count, threads), threads, 0, stream>>>(lists, next);
  check();
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(most_many, 1024));
  if (most_many > 0) {
    order_tokens<<<blocks, threads, 0, stream>>>(lists, ordered);
    check();
  }
  const auto launch = [&]<int n>(std::integral_constant<int, n>) {
    const std::int64_t packs = (width + n - 1) / n;
    const auto block_threads = static_cast<unsigned>(std::min<std::int64_t>(threads, (packs + 31) / 32 * 32));
    add_tokens<n><<<blocks_for(num_sums, 1), block_threads, 0, stream>>>(lists, ordered, native(dy), width, parts, sum);
    check();
    if (most_many == 0) return;
    add_parts<n><<<blocks, block_threads, 0, stream>>>(lists, static_cast<const W*>(parts), width, sum);
    check();
  };
  constexpr int n = elements_per_vector<T>;
  if (width % n == 0 && vectors_fit(dy, into.out)) {
    launch(std::integral_constant<int, n>());
  } else {
    launch(std::integral_constant<int, 1>());
  }
}

#define STEPGRAPH_EMBEDDING(T)                                                                              \
  template void embedding_gradient(const DeviceQueue&, const std::int32_t*, std::int64_t, const TableRows&, \
                                   std::int64_t, const T*, const Into<T, Wide<T>>&)
STEPGRAPH_EMBEDDING(float);
STEPGRAPH_EMBEDDING(double);
STEPGRAPH_EMBEDDING(bf16);
STEPGRAPH_EMBEDDING(f16);
#undef STEPGRAPH_EMBEDDING

}  // namespace stepgraph::cuda
