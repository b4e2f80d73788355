#include "ops/cuda/attention/attention.hpp"
#include "ops/cuda/attention/attention_tiles.cuh"
#include "ops/cuda/attention/dnn_attention.hpp"

// As on the CPU: with P the probabilities and Z the dropout factors, dV = (P Z)^T dO; dP = (dO V^T) Z; dS = P (dP -
// rowsum(dO O)); dQ = scale dS K; dK = scale dS^T Q (FlashAttention-2, section 2.3.2). One kernel has blocks for tiles
// of queries, another for tiles of keys. Both compute the scores, so that no block adds to another block's sums.
namespace stepgraph::cuda {
namespace {

// The layout of log_sums that forward wrote.
struct LogSumLayout {
  std::int64_t position, head;  // distance between neighbours
  double unit;                  // log2 of the base of the logarithms
};

template <class N>
struct Backward {
  using W = Computed<N>;
  AttentionSizes sizes;
  const N* qkv;
  const N* out;
  const W* log_sums;
  LogSumLayout log_sum_layout;
  const N* d_out;
  W* products;
  N* d_qkv;
  const N* base;  // of d_qkv; null: no previous value
  AttentionDropout dropout;
};

// products = rowsum(dO O): one warp per position and head.
template <class N>
__global__ void __launch_bounds__(attention_threads) products_kernel(Backward<N> a, std::int64_t count) {
  using W               = Computed<N>;
  const int lane        = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * (attention_threads / 32) + threadIdx.x / 32;
  if (at >= count) return;
  const N* const out   = a.out + at * a.sizes.head_size;
  const N* const d_out = a.d_out + at * a.sizes.head_size;
  W sum                = 0;
  for (int i = lane; i < a.sizes.head_size; i += 32) sum += widen(out[i]) * widen(d_out[i]);
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  if (lane == 0) a.products[at] = sum;
}

// A tile of queries and a tile of keys, for both kernels.
template <class N, int head>
struct TilePair {
  using W = Computed<N>;
  using Q = Tile<W, head>;
  W *queries, *d_out, *keys, *values;

  // Calls share(row, col, probability after dropout, gradient of the score) for the elements of this thread.
  template <class Share>
  __device__ void each(const Backward<N>& a, std::int64_t sequence, int own_head, int first, int first_key,
                       DroppedHead<W>& drop, const Share& share) const {
    const int depth           = (a.sizes.head_size + Q::lanes - 1) / Q::lanes * Q::lanes;
    typename Q::Scores scores = {}, d_scores = {};
    add_scores<Q>(queries, keys, depth, scores);
    add_scores<Q>(d_out, values, depth, d_scores);
#pragma unroll
    for (int i = 0; i < Q::per_thread; ++i) {
      const int row                 = thread_row() * Q::per_thread + i;
      const bool inside             = first + row < a.sizes.seq;
      const std::int64_t at         = (sequence * a.sizes.seq + first + row) * a.sizes.heads + own_head;
      const std::int64_t log_sum_at = sequence * a.sizes.seq * a.sizes.heads +
                                      (first + row) * a.log_sum_layout.position + own_head * a.log_sum_layout.head;
      const W unit    = static_cast<W>(a.log_sum_layout.unit);
      const W log_sum = inside ? a.log_sums[log_sum_at] * unit : W(0), product = inside ? a.products[at] : W(0);
#pragma unroll
      for (int j = 0; j < Q::per_thread; ++j) {
        const int col = thread_col() + 16 * j;
        if (inside && first_key + col <= first + row) {
          const W power = power_of_two(scores[i][j] * static_cast<W>(a.sizes.binary_scale) - log_sum);
          const W kept  = drop.factor(first + row, first_key + col);
          share(row, col, power * kept, power * (d_scores[i][j] * kept - product));
        } else {
          share(row, col, W(0), W(0));
        }
      }
    }
  }
};

// A block has a tile of queries of one head and loops over the keys they attend to. Late tiles have the most keys, so
// they start first.
template <class N, int head>
__global__ void __launch_bounds__(attention_threads) queries_kernel(Backward<N> a, int all_heads) {
  using W = Computed<N>;
  using Q = Tile<W, head>;
  extern __shared__ __align__(16) unsigned char shared[];
  W* const begin = reinterpret_cast<W*>(shared);
  const TilePair<N, head> tiles{begin, begin + Q::size, begin + 2 * Q::size, begin + 3 * Q::size};
  W* const d_scores           = begin + 4 * Q::size;
  const AttentionSizes& sizes = a.sizes;
  const int num_tiles         = (sizes.seq + Q::rows - 1) / Q::rows;
  const int first             = (num_tiles - 1 - static_cast<int>(blockIdx.x / all_heads)) * Q::rows;
  const int sequence          = static_cast<int>(blockIdx.x % all_heads) / sizes.heads;
  const int own_head          = static_cast<int>(blockIdx.x % all_heads) % sizes.heads;
  const int key_head          = sizes.heads + own_head / (sizes.heads / sizes.kv_heads);
  DroppedHead<W> drop(a.dropout, sequence, own_head, sizes.seq);

  load_tile<Q>(sizes.rows(a.qkv, sizes.qkv_row(), own_head, sequence, first), W(1), tiles.queries);
  load_tile<Q>(sizes.rows(a.d_out, sizes.out_row(), own_head, sequence, first), W(1), tiles.d_out);
  typename Q::Sums d_queries;
  clear<Q>(d_queries);
  for (int first_key = 0; first_key <= first; first_key += Q::rows) {
    __syncthreads();  // the previous tiles have been used
    load_tile<Q>(sizes.rows(a.qkv, sizes.qkv_row(), key_head, sequence, first_key), W(1), tiles.keys);
    load_tile<Q>(sizes.rows(a.qkv, sizes.qkv_row(), key_head + sizes.kv_heads, sequence, first_key), W(1),
                 tiles.values);
    __syncthreads();
    tiles.each(a, sequence, own_head, first, first_key, drop,
               [&](int row, int col, W, W d_score) { d_scores[row * Q::score_stride + col] = d_score; });
    __syncwarp();  // rows of d_scores are read only by the warp that wrote them
    add_across<Q>(d_scores, tiles.keys, d_queries);
  }
  const std::int64_t at = (static_cast<std::int64_t>(sequence) * sizes.seq + first) * sizes.qkv_row() +
                          static_cast<std::int64_t>(own_head) * sizes.head_size;
  put_sums<Q>(
      d_queries, [&sizes](int) { return static_cast<W>(sizes.scale); }, a.d_qkv + at,
      a.base == nullptr ? nullptr : a.base + at, sizes.qkv_row(), sizes.seq - first, sizes.head_size, sizes.vectors);
}

// A block has a tile of keys and values of one head and loops over the queries of all heads that attend to them. Early
// tiles have the most queries, so they start first.
template <class N, int head>
__global__ void __launch_bounds__(attention_threads) keys_kernel(Backward<N> a, int all_heads) {
  using W = Computed<N>;
  using Q = Tile<W, head>;
  extern __shared__ __align__(16) unsigned char shared[];
  W* const begin = reinterpret_cast<W*>(shared);
  const TilePair<N, head> tiles{begin, begin + Q::size, begin + 2 * Q::size, begin + 3 * Q::size};
  W* const shares             = begin + 4 * Q::size;
  W* const d_scores           = shares + Q::score_size;
  const AttentionSizes& sizes = a.sizes;
  const int first_key         = static_cast<int>(blockIdx.x / all_heads) * Q::rows;
  const int sequence          = static_cast<int>(blockIdx.x % all_heads) / sizes.kv_heads;
  const int kv_head           = static_cast<int>(blockIdx.x % all_heads) % sizes.kv_heads;
  const int group = sizes.heads / sizes.kv_heads, key_head = sizes.heads + kv_head,
            value_head = key_head + sizes.kv_heads;
  DroppedHead<W> drop(a.dropout, sequence, kv_head * group, sizes.seq);

  load_tile<Q>(sizes.rows(a.qkv, sizes.qkv_row(), key_head, sequence, first_key), W(1), tiles.keys);
  load_tile<Q>(sizes.rows(a.qkv, sizes.qkv_row(), value_head, sequence, first_key), W(1), tiles.values);
  typename Q::Sums d_keys, d_values;
  clear<Q>(d_keys);
  clear<Q>(d_values);
  for (int own_head = kv_head * group; own_head < (kv_head + 1) * group; ++own_head) {
    drop.take_head(a.dropout, sequence, own_head);
    for (int first = first_key; first < sizes.seq; first += Q::rows) {
      __syncthreads();  // the previous tiles have been used
      load_tile<Q>(sizes.rows(a.qkv, sizes.qkv_row(), own_head, sequence, first), W(1), tiles.queries);
      load_tile<Q>(sizes.rows(a.d_out, sizes.out_row(), own_head, sequence, first), W(1), tiles.d_out);
      __syncthreads();
      tiles.each(a, sequence, own_head, first, first_key, drop, [&](int row, int col, W share, W d_score) {
        shares[row * Q::score_stride + col]   = share;
        d_scores[row * Q::score_stride + col] = d_score;
      });
      __syncthreads();  // columns are read by other threads than wrote them
      add_down<Q>(shares, tiles.d_out, d_values);
      add_down<Q>(d_scores, tiles.queries, d_keys);
    }
  }
  const auto put = [&](const typename Q::Sums& sums, int of_head, W factor) {
    const std::int64_t at = (static_cast<std::int64_t>(sequence) * sizes.seq + first_key) * sizes.qkv_row() +
                            static_cast<std::int64_t>(of_head) * sizes.head_size;
    put_sums<Q>(
        sums, [factor](int) { return factor; }, a.d_qkv + at, a.base == nullptr ? nullptr : a.base + at,
        sizes.qkv_row(), sizes.seq - first_key, sizes.head_size, sizes.vectors);
  };
  put(d_keys, key_head, static_cast<W>(sizes.scale));
  put(d_values, value_head, W(1));
}

}  // namespace

template <class T>
void attention_backward(const DeviceQueue& queue, const AttentionBackward<T>& attention, const Into<T>& d_qkv) {
  using N                     = Native<T>;
  const AttentionShape& shape = attention.shape;
  const std::int64_t count    = attention.sequences * shape.seq * shape.heads;
  if (count == 0) return;
  LogSumLayout log_sum_layout{.position = shape.heads, .head = 1, .unit = 1};
  if constexpr (sizeof(T) == 2) {
    if (dnn_attends(queue, shape, attention.sequences, attention.qkv, attention.out, attention.dropout)) {
      if (dnn_attention_backward(queue, attention, d_qkv)) return;
      log_sum_layout = {.position = 1, .head = shape.seq, .unit = std::numbers::log2e};
    }
  }
  Backward<N> backward{.sizes          = AttentionSizes(shape),
                       .qkv            = native(attention.qkv),
                       .out            = native(attention.out),
                       .log_sums       = attention.log_sums,
                       .log_sum_layout = log_sum_layout,
                       .d_out          = native(attention.d_out),
                       .products       = attention.products,
                       .d_qkv          = native(d_qkv.out),
                       .base           = native(d_qkv.base),
                       .dropout        = attention.dropout};
  backward.sizes.vectors =
      whole_vectors(shape, sizeof(T), attention.qkv, attention.d_out, d_qkv.out, d_qkv.base);  // null is aligned
  with_head(shape, [&](auto head) {
    using Q = Tile<Wide<T>, decltype(head)::value>;
    products_kernel<N>
        <<<blocks_for(count, attention_threads / 32), attention_threads, 0, stream_of(queue)>>>(backward, count);
    check_launch("attention_backward products");
    const auto launch = [&](std::string_view name, auto* kernel, std::int64_t heads, int score_tiles) {
      launch_tiles(queue, name, kernel, (shape.seq + Q::rows - 1) / Q::rows * attention.sequences * heads,
                   sizeof(Wide<T>) * (4 * Q::size + score_tiles * Q::score_size), backward,
                   static_cast<int>(attention.sequences * heads));
    };
    launch("attention_backward queries", &queries_kernel<N, Q::head>, shape.heads, 1);
    launch("attention_backward keys", &keys_kernel<N, Q::head>, shape.kv_heads, 2);
  });
}

template void attention_backward<float>(const DeviceQueue&, const AttentionBackward<float>&, const Into<float>&);
template void attention_backward<double>(const DeviceQueue&, const AttentionBackward<double>&, const Into<double>&);
template void attention_backward<bf16>(const DeviceQueue&, const AttentionBackward<bf16>&, const Into<bf16>&);
template void attention_backward<f16>(const DeviceQueue&, const AttentionBackward<f16>&, const Into<f16>&);

}  // namespace stepgraph::cuda
