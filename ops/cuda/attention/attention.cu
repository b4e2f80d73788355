#include "ops/cuda/attention/attention.hpp"

#include "ops/cuda/attention/attention_tiles.cuh"
#include "ops/cuda/attention/dnn_attention.hpp"

namespace stepgraph::cuda {
namespace {

__device__ float log_of_two(float x) { return log2f(x); }
__device__ double log_of_two(double x) { return log2(x); }

// Reduces over the 16 threads that share rows.
template <class W>
__device__ W row_max(W value) {
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) {
    const W other = __shfl_xor_sync(0xffffffffu, value, apart);
    value         = other > value ? other : value;
  }
  return value;
}
template <class W>
__device__ W row_sum(W value) {
#pragma unroll
  for (int apart = 8; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
  return value;
}

// A block has a tile of queries of one head and loops over the keys they attend to. Late tiles have the most keys, so
// they start first.
template <class N, int head>
__global__ void __launch_bounds__(attention_threads)
    forward_kernel(AttentionSizes sizes, int all_heads, const N* qkv, N* out, Computed<N>* log_sums,
                   AttentionDropout dropout) {
  using W = Computed<N>;
  using Q = Tile<W, head>;
  extern __shared__ __align__(16) unsigned char shared[];
  W* const queries   = reinterpret_cast<W*>(shared);
  W* const keys      = queries + Q::size;
  W* const values    = keys + Q::size;
  W* const shares    = values + Q::size;
  const W nothing    = -static_cast<W>(INFINITY);
  const int tiles    = (sizes.seq + Q::rows - 1) / Q::rows;
  const int first    = (tiles - 1 - static_cast<int>(blockIdx.x / all_heads)) * Q::rows;
  const int sequence = static_cast<int>(blockIdx.x % all_heads) / sizes.heads;
  const int own_head = static_cast<int>(blockIdx.x % all_heads) % sizes.heads;
  const int key_head = sizes.heads + own_head / (sizes.heads / sizes.kv_heads), value_head = key_head + sizes.kv_heads;
  const int depth = (sizes.head_size + Q::lanes - 1) / Q::lanes * Q::lanes;
  DroppedHead<W> drop(dropout, sequence, own_head, sizes.seq);

  load_tile<Q>(sizes.rows(qkv, sizes.qkv_row(), own_head, sequence, first), static_cast<W>(sizes.binary_scale),
               queries);
  W most[Q::per_thread], sums[Q::per_thread];  // per row: the largest score, and this thread's part of the sum
  typename Q::Sums results;
  clear<Q>(results);
#pragma unroll
  for (int i = 0; i < Q::per_thread; ++i) {
    most[i] = nothing;
    sums[i] = 0;
  }
  for (int first_key = 0; first_key <= first; first_key += Q::rows) {
    __syncthreads();  // the previous tiles have been used
    load_tile<Q>(sizes.rows(qkv, sizes.qkv_row(), key_head, sequence, first_key), W(1), keys);
    load_tile<Q>(sizes.rows(qkv, sizes.qkv_row(), value_head, sequence, first_key), W(1), values);
    __syncthreads();
    typename Q::Scores scores = {};
    add_scores<Q>(queries, keys, depth, scores);
#pragma unroll
    for (int i = 0; i < Q::per_thread; ++i) {
      const int row = thread_row() * Q::per_thread + i;
      W largest     = most[i];
#pragma unroll
      for (int j = 0; j < Q::per_thread; ++j) {
        if (first_key == first && thread_col() + 16 * j > row) scores[i][j] = nothing;
        largest = scores[i][j] > largest ? scores[i][j] : largest;
      }
      largest        = row_max(largest);
      const W shrink = power_of_two(most[i] - largest);
      most[i]        = largest;
      sums[i] *= shrink;
#pragma unroll
      for (int j = 0; j < Q::per_thread; ++j) {
        const int col = thread_col() + 16 * j;
        const W power = power_of_two(scores[i][j] - largest);
        sums[i] += power;
        shares[row * Q::score_stride + col] = power * drop.factor(first + row, first_key + col);
      }
#pragma unroll
      for (int v = 0; v < Q::vectors; ++v) {
#pragma unroll
        for (int l = 0; l < Q::lanes; ++l) results[i][v].at[l] *= shrink;
      }
    }
    __syncwarp();  // rows of shares are read only by the warp that wrote them
    add_across<Q>(shares, values, results);
  }
#pragma unroll
  for (int i = 0; i < Q::per_thread; ++i) {
    sums[i]       = row_sum(sums[i]);
    const int row = first + thread_row() * Q::per_thread + i;
    if (row < sizes.seq && thread_col() == 0) {
      log_sums[(static_cast<std::int64_t>(sequence) * sizes.seq + row) * sizes.heads + own_head] =
          most[i] + log_of_two(sums[i]);
    }
  }
  N* const to = out + (static_cast<std::int64_t>(sequence) * sizes.seq + first) * sizes.out_row() +
                static_cast<std::int64_t>(own_head) * sizes.head_size;
  put_sums<Q>(
      results, [&sums](int i) { return W(1) / sums[i]; }, to, static_cast<const N*>(nullptr), sizes.out_row(),
      sizes.seq - first, sizes.head_size, sizes.vectors);
}

}  // namespace

template <class T>
void attention_forward(const DeviceQueue& queue, const AttentionForward<T>& attention) {
  const AttentionShape& shape = attention.shape;
  if constexpr (sizeof(T) == 2) {
    if (dnn_attends(queue, shape, attention.sequences, attention.qkv, attention.out, attention.dropout)) {
      return dnn_attention_forward(queue, attention);
    }
  }
  AttentionSizes sizes(shape);
  sizes.vectors = whole_vectors(shape, sizeof(T), attention.qkv, attention.out);
  with_head(shape, [&](auto head) {
    using N                  = Native<T>;
    using Q                  = Tile<Wide<T>, decltype(head)::value>;
    const std::int64_t heads = attention.sequences * shape.heads;
    launch_tiles(queue, "attention", &forward_kernel<N, Q::head>, (shape.seq + Q::rows - 1) / Q::rows * heads,
                 sizeof(Wide<T>) * (3 * Q::size + Q::score_size), sizes, static_cast<int>(heads), native(attention.qkv),
                 native(attention.out), attention.log_sums, attention.dropout);
  });
}

template void attention_forward<float>(const DeviceQueue&, const AttentionForward<float>&);
template void attention_forward<double>(const DeviceQueue&, const AttentionForward<double>&);
template void attention_forward<bf16>(const DeviceQueue&, const AttentionForward<bf16>&);
template void attention_forward<f16>(const DeviceQueue&, const AttentionForward<f16>&);

}  // namespace stepgraph::cuda
