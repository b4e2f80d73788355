#pragma once
#include <cstdint>
#include <numbers>
#include <type_traits>

#include "ops/cuda/attention/attention.hpp"
#include "ops/cuda/common/launch.cuh"
#include "ops/cuda/common/pack.cuh"
#include "ops/cuda/common/random_mask.cuh"

// Shared by forward and backward attention; internal to them. A block of 16 x 16 threads works on square tiles of
// scores. Tiles of queries, keys, values and output gradients are in shared memory in the compute type, padded with
// zeros beyond the sequence and the head.
namespace stepgraph::cuda {

inline constexpr int attention_threads = 256;
__device__ inline int thread_row() { return static_cast<int>(threadIdx.x) / 16; }
__device__ inline int thread_col() { return static_cast<int>(threadIdx.x) % 16; }

template <int size, class T>
__device__ const Pack<T, size>& pack_at(const T* from) {
  return *reinterpret_cast<const Pack<T, size>*>(from);
}
template <int size, class T>
__device__ Pack<T, size>& pack_at(T* to) {
  return *reinterpret_cast<Pack<T, size>*>(to);
}

// Tiles for heads of up to `head_` elements. A thread has `per_thread` consecutive rows. In a tile of scores it has as
// many columns, 16 apart; in other tiles, `vectors` vectors.
template <class W_, int head_>
struct Tile {
  using W                           = W_;
  static constexpr int head         = head_;
  static constexpr int lanes        = 16 / static_cast<int>(sizeof(W));
  static constexpr int row_bytes    = head * static_cast<int>(sizeof(W));
  static constexpr int rows         = row_bytes <= 512 ? 64 : row_bytes <= 1024 ? 32 : 16;
  static constexpr int stride       = head + lanes;  // skewed, so that a column of vectors uses different banks
  static constexpr int score_stride = rows + lanes;
  static constexpr int size         = rows * stride;
  static constexpr int score_size   = rows * score_stride;
  static constexpr int per_thread   = rows / 16;
  static constexpr int vectors      = head / (16 * lanes);
  using Scores                      = W[per_thread][per_thread];
  using Sums                        = Pack<W, lanes>[per_thread][vectors];
};

// One head's rows of a sequence, from a given position on.
template <class T>
struct HeadRows {
  const T* data;
  std::int64_t stride;
  int count;      // rows until the end of the sequence
  int head_size;  // elements per row
  bool vectors;   // rows consist of whole 16-byte vectors
};

// Loads rows times a factor into a tile.
template <class Tile, class T>
__device__ void load_tile(const HeadRows<T>& from, typename Tile::W factor, typename Tile::W* to) {
  using W = typename Tile::W;
  if (from.vectors) {
    constexpr int size = 16 / static_cast<int>(sizeof(T)), in_row = Tile::head / size;
    for (int i = static_cast<int>(threadIdx.x); i < Tile::rows * in_row; i += attention_threads) {
      const int row = i / in_row, col = i % in_row * size;
      Pack<W, size> values;
      if (row < from.count && col < from.head_size) {
        const Pack<T, size> in = pack_at<size>(from.data + row * from.stride + col);
#pragma unroll
        for (int u = 0; u < size; ++u) values.at[u] = widen(in.at[u]) * factor;
      } else {
#pragma unroll
        for (int u = 0; u < size; ++u) values.at[u] = W(0);
      }
      pack_at<size>(to + row * Tile::stride + col) = values;
    }
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < Tile::rows * Tile::head; i += attention_threads) {
      const int row = i / Tile::head, col = i % Tile::head;
      const bool inside            = row < from.count && col < from.head_size;
      to[row * Tile::stride + col] = inside ? widen(from.data[row * from.stride + col]) * factor : W(0);
    }
  }
}

// scores += a b^T, over `depth` columns.
template <class Tile>
__device__ void add_scores(const typename Tile::W* a, const typename Tile::W* b, int depth,
                           typename Tile::Scores& scores) {
  using W = typename Tile::W;
  a += thread_row() * Tile::per_thread * Tile::stride;
  b += thread_col() * Tile::stride;
#pragma unroll 2
  for (int d = 0; d < depth; d += Tile::lanes) {
    Pack<W, Tile::lanes> x[Tile::per_thread], y[Tile::per_thread];
#pragma unroll
    for (int i = 0; i < Tile::per_thread; ++i) {
      x[i] = pack_at<Tile::lanes>(a + i * Tile::stride + d);
      y[i] = pack_at<Tile::lanes>(b + i * 16 * Tile::stride + d);
    }
#pragma unroll
    for (int i = 0; i < Tile::per_thread; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::per_thread; ++j) {
#pragma unroll
        for (int u = 0; u < Tile::lanes; ++u) scores[i][j] += x[i].at[u] * y[j].at[u];
      }
    }
  }
}

// sums += scores b.
template <class Tile>
__device__ void add_across(const typename Tile::W* scores, const typename Tile::W* b, typename Tile::Sums& sums) {
  using W = typename Tile::W;
  scores += thread_row() * Tile::per_thread * Tile::score_stride;
  b += thread_col() * Tile::lanes;
#pragma unroll 2
  for (int k = 0; k < Tile::rows; k += Tile::lanes) {
    Pack<W, Tile::lanes> x[Tile::per_thread];
#pragma unroll
    for (int i = 0; i < Tile::per_thread; ++i) x[i] = pack_at<Tile::lanes>(scores + i * Tile::score_stride + k);
#pragma unroll
    for (int u = 0; u < Tile::lanes; ++u) {
#pragma unroll
      for (int v = 0; v < Tile::vectors; ++v) {
        const Pack<W, Tile::lanes> y = pack_at<Tile::lanes>(b + (k + u) * Tile::stride + v * 16 * Tile::lanes);
#pragma unroll
        for (int i = 0; i < Tile::per_thread; ++i) {
#pragma unroll
          for (int l = 0; l < Tile::lanes; ++l) sums[i][v].at[l] += x[i].at[u] * y.at[l];
        }
      }
    }
  }
}

// sums += scores^T b.
template <class Tile>
__device__ void add_down(const typename Tile::W* scores, const typename Tile::W* b, typename Tile::Sums& sums) {
  using W = typename Tile::W;
  scores += thread_row() * Tile::per_thread;
  b += thread_col() * Tile::lanes;
#pragma unroll 4
  for (int k = 0; k < Tile::rows; ++k) {
    const Pack<W, Tile::per_thread> x = pack_at<Tile::per_thread>(scores + k * Tile::score_stride);
#pragma unroll
    for (int v = 0; v < Tile::vectors; ++v) {
      const Pack<W, Tile::lanes> y = pack_at<Tile::lanes>(b + k * Tile::stride + v * 16 * Tile::lanes);
#pragma unroll
      for (int i = 0; i < Tile::per_thread; ++i) {
#pragma unroll
        for (int l = 0; l < Tile::lanes; ++l) sums[i][v].at[l] += x.at[i] * y.at[l];
      }
    }
  }
}

// Writes the rows of sums, times a factor each, to `to`, added to `base` if it is not null. Rows are `stride` apart;
// `count` of them are inside the sequence.
template <class Tile, class T, class Factor>
__device__ void put_sums(const typename Tile::Sums& sums, const Factor& factor, T* to, const T* base,
                         std::int64_t stride, int count, int head_size, bool vectors) {
  using W = typename Tile::W;
#pragma unroll
  for (int i = 0; i < Tile::per_thread; ++i) {
    const int row = thread_row() * Tile::per_thread + i;
    if (row >= count) continue;
    const W times = factor(i);
#pragma unroll
    for (int v = 0; v < Tile::vectors; ++v) {
      const int col         = (v * 16 + thread_col()) * Tile::lanes;
      const std::int64_t at = row * stride + col;
      if (vectors && col < head_size) {
        Pack<T, Tile::lanes> out, before;
        if (base != nullptr) before = pack_at<Tile::lanes>(base + at);
#pragma unroll
        for (int l = 0; l < Tile::lanes; ++l) {
          const W value = sums[i][v].at[l] * times;
          out.at[l]     = narrow_to<T>(base == nullptr ? value : widen(before.at[l]) + value);
        }
        pack_at<Tile::lanes>(to + at) = out;
      } else {
#pragma unroll
        for (int l = 0; l < Tile::lanes; ++l) {
          const W value = sums[i][v].at[l] * times;
          if (col + l < head_size) to[at + l] = narrow_to<T>(base == nullptr ? value : widen(base[at + l]) + value);
        }
      }
    }
  }
}

template <class Tile>
__device__ void clear(typename Tile::Sums& sums) {
#pragma unroll
  for (int i = 0; i < Tile::per_thread; ++i) {
#pragma unroll
    for (int v = 0; v < Tile::vectors; ++v) {
#pragma unroll
      for (int l = 0; l < Tile::lanes; ++l) sums[i][v].at[l] = 0;
    }
  }
}

// Shapes for kernels.
struct AttentionSizes {
  explicit AttentionSizes(const AttentionShape& shape)
      : seq(static_cast<int>(shape.seq)),
        heads(static_cast<int>(shape.heads)),
        kv_heads(static_cast<int>(shape.kv_heads)),
        head_size(static_cast<int>(shape.head_size)),
        scale(shape.scale),
        binary_scale(shape.scale * std::numbers::log2e) {}
  int seq, heads, kv_heads, head_size;
  bool vectors = false;  // rows consist of whole 16-byte vectors
  double scale, binary_scale;

  __device__ std::int64_t qkv_row() const { return static_cast<std::int64_t>(heads + 2 * kv_heads) * head_size; }
  __device__ std::int64_t out_row() const { return static_cast<std::int64_t>(heads) * head_size; }
  // Head `head` of rows of `row` elements, from position `first` of a sequence on.
  template <class T>
  __device__ HeadRows<T> rows(const T* all, std::int64_t row, int head, std::int64_t sequence, int first) const {
    return {all + (sequence * seq + first) * row + static_cast<std::int64_t>(head) * head_size, row, seq - first,
            head_size, vectors};
  }
};

// The factors by which dropout multiplies the probabilities of one head.
template <class W>
class DroppedHead {
 public:
  __device__ DroppedHead(const AttentionDropout& dropout, std::int64_t sequence, int head, int seq)
      : active_(dropout.step != nullptr),
        mask_(dropout.key, active_ ? *dropout.step : 0, dropout.dropped),
        kept_(static_cast<W>(dropout.scale)),
        seq_(seq) {
    take_head(dropout, sequence, head);
  }
  __device__ void take_head(const AttentionDropout& dropout, std::int64_t sequence, int head) {
    const std::int64_t before = (dropout.first_sequence + sequence) * dropout.all_heads + dropout.first_head + head;
    first_                    = static_cast<std::uint64_t>(before) * seq_ * seq_;
  }
  __device__ W factor(int query, int key) {
    if (!active_) return W(1);
    return mask_.keeps(first_ + static_cast<std::uint64_t>(query) * seq_ + key) ? kept_ : W(0);
  }

 private:
  bool active_;
  RandomMask mask_;
  W kept_;
  std::uint64_t seq_, first_;
};

__device__ inline float power_of_two(float x) { return exp2f(x); }
__device__ inline double power_of_two(double x) { return exp2(x); }

template <class... Pointers>
bool whole_vectors(const AttentionShape& shape, std::size_t element_bytes, Pointers... pointers) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  return static_cast<std::size_t>(shape.head_size) * element_bytes % 16 == 0 && (aligned(pointers) && ...);
}

// Calls launch(std::integral_constant) with the smallest tile width that holds a head.
template <class Launch>
void with_head(const AttentionShape& shape, const Launch& launch) {
  if (shape.head_size <= 64) return launch(std::integral_constant<int, 64>{});
  if (shape.head_size <= 128) return launch(std::integral_constant<int, 128>{});
  if (shape.head_size <= 256) return launch(std::integral_constant<int, 256>{});
  throw Error(ErrorKind::config, str("attention: head_size(", shape.head_size, ") on a CUDA device (at most 256)"));
}

// Launches one block per tile and head, with the given bytes of dynamic shared memory.
template <class Kernel, class... Arguments>
void launch_tiles(const DeviceQueue& queue, std::string_view name, Kernel* kernel, std::int64_t blocks,
                  std::size_t shared_bytes, const Arguments&... arguments) {
  if (blocks == 0) return;
  if (blocks > 0x7fffffff)
    throw Error(ErrorKind::config, str("cuda: ", name, ": ", blocks, " tiles (at most 2^31 - 1)"));
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (status == cudaErrorInvalidValue) {
    static_cast<void>(cudaGetLastError());
    throw Error(ErrorKind::backend, str("cuda: ", name, ": a block needs ", shared_bytes,
                                        " bytes of shared memory, more than this device has "
                                        "(compute capability 9.0 or newer, smaller heads, or bf16)"));
  }
  check_cuda(status, name);
  kernel<<<static_cast<unsigned>(blocks), attention_threads, shared_bytes, stream_of(queue)>>>(arguments...);
  check_launch(name);
}

}  // namespace stepgraph::cuda
