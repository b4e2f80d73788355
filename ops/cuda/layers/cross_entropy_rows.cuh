#pragma once
#include <type_traits>

#include "ops/cuda/common/pack.cuh"
#include "ops/cuda/layers/cross_entropy.hpp"

// Rows of logits, one thread block each. Internal to ops/cuda/.
namespace stepgraph::cuda {

inline constexpr int most_threads     = 512;
inline constexpr int most_warps       = most_threads / 32;
inline constexpr int packs_at_once    = 4;  // per thread: all loads are issued before the first is used
inline constexpr unsigned whole_warp  = 0xffffffffu;
inline constexpr std::int32_t ignored = -1;  // ignored_target of ops/layers/cross_entropy.hpp

// The type in which a thread sums exponentials: float has enough bits for 2-byte types.
template <class N>
using Total = std::conditional_t<sizeof(N) == 2, float, double>;

// e^x with far more precision than 2-byte types need. Subnormal results are 0.
__device__ inline float quick_exponential(float x) {
  constexpr float log2_e = 1.44269504f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * log2_e));
  return power;
}
template <class N>
__device__ Computed<N> exponential(Computed<N> x) {
  if constexpr (sizeof(N) == 2) {
    return quick_exponential(x);
  } else {
    return exp(x);  // the float overload if x is float
  }
}
template <class W>
__device__ W lowest() {
  return -static_cast<W>(__int_as_float(0x7f800000));
}
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }  // NaNs are ignored
__device__ inline double larger(double a, double b) { return fmax(a, b); }

// --- a row -----------------------------------------------------------------------------------------------------------

// A row as aligned packs of n, plus the elements left over at both ends: fewer than 2 n, one per thread. The assignment
// to threads is the same on every call.
template <class N, int n>
struct Row {
  std::int64_t before, packs, left;

  __device__ Row(const N* row, std::int64_t cols) : before(0) {
    if constexpr (n > 1) {
      const std::size_t past = reinterpret_cast<std::size_t>(row) % vector_bytes;
      before                 = past == 0 ? 0 : min(cols, static_cast<std::int64_t>((vector_bytes - past) / sizeof(N)));
    }
    packs = (cols - before) / n;
    left  = cols - packs * n;
  }
  // The left-over element of this thread; -1: none.
  [[nodiscard]] __device__ std::int64_t left_over() const {
    const std::int64_t i = threadIdx.x;
    return i >= left ? -1 : i < before ? i : i + packs * n;
  }
  // Calls use(pack, index). Issues several `load(index)` before the first use.
  template <class Load, class Use>
  __device__ void for_packs(const Load& load, const Use& use) const {
    for (std::int64_t i = threadIdx.x; i < packs; i += packs_at_once * blockDim.x) {
      Pack<N, n> loaded[packs_at_once];
#pragma unroll
      for (int k = 0; k < packs_at_once; ++k) {
        if (i + k * blockDim.x < packs) loaded[k] = load(i + k * blockDim.x);
      }
#pragma unroll
      for (int k = 0; k < packs_at_once; ++k) {
        if (i + k * blockDim.x < packs) use(loaded[k], i + k * blockDim.x);
      }
    }
  }
};

// Calls use(pack) for all of a row, in packs of n and of 1.
template <int n, class N, class Use>
__device__ void for_row(const N* row, std::int64_t cols, const Use& use) {
  const Row<N, n> parts(row, cols);
  parts.for_packs([&](std::int64_t i) { return load_pack<n>(row + parts.before + i * n); },
                  [&](const Pack<N, n>& pack, std::int64_t) { use(pack); });
  const std::int64_t left = parts.left_over();
  if (left >= 0) use(load_pack<1>(row + left));
}

// --- the sums of a thread --------------------------------------------------------------------------------------------

// The running maximum, and the sum of exp(x - maximum).
template <class N>
struct Softmax {
  Computed<N> most = lowest<Computed<N>>();
  Total<N> sum     = 0;

  template <int n>
  __device__ void add(const Pack<N, n>& pack) {
    Computed<N> x[n], most_here = lowest<Computed<N>>();
#pragma unroll
    for (int k = 0; k < n; ++k) {
      x[k]      = widen(pack.at[k]);
      most_here = larger(most_here, x[k]);
    }
    if (most_here > most) {
      sum *= exponential<N>(most - most_here);
      most = most_here;
    }
    const Computed<N> from = most == lowest<Computed<N>>() ? Computed<N>(0) : most;
#pragma unroll
    for (int k = 0; k < n; ++k) sum += exponential<N>(x[k] - from);
  }
};

// Combines a value over all threads of a block, in an order that depends only on their number. All threads get the
// result. `room` has one element per warp.
template <class W, class Join>
__device__ W block_join(W value, W* room, const Join& join) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value = join(value, __shfl_xor_sync(whole_warp, value, apart));
  __syncthreads();  // another reduction may still use the room
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  value = room[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x / 32); ++warp) value = join(value, room[warp]);
  return value;
}
template <class W>
__device__ W block_most(W value) {
  __shared__ W room[most_warps];
  return block_join(value, room, [](W a, W b) { return larger(a, b); });
}
__device__ inline double block_sum(double value) {
  __shared__ double room[most_warps];
  return block_join(value, room, [](double a, double b) { return a + b; });
}

// --- rows ------------------------------------------------------------------------------------------------------------

// Logits and targets, for kernels.
template <class N>
struct DeviceRows {
  std::int64_t rows, cols;
  const N* logits;
  const std::int32_t* targets;
  std::int64_t vocab_begin;
  bool has_last;

  // The row of this block.
  [[nodiscard]] __device__ const N* row() const { return logits + static_cast<std::int64_t>(blockIdx.x) * cols; }
  [[nodiscard]] __device__ bool counts(std::int64_t row) const { return targets[row] != ignored; }
  // The column of a row's target; -1: not among these columns.
  [[nodiscard]] __device__ std::int64_t target(std::int64_t row) const {
    const std::int64_t at = targets[row] - vocab_begin;
    return at >= 0 && at < cols ? at : -1;
  }
  // The target logit of a row whose target is not among these columns: 0 if another rank has it or it does not count,
  // NaN if it is outside the vocabulary.
  [[nodiscard]] __device__ double logit_of_none(std::int64_t row) const {
    const std::int64_t index = targets[row];
    const bool in_vocabulary = index >= ignored && (!has_last || index - vocab_begin < cols);
    return in_vocabulary ? 0 : __longlong_as_double(0x7ff8000000000000);
  }
  // The target logit of this block's row.
  [[nodiscard]] __device__ double target_logit(const N* row) const {
    const std::int64_t at = target(blockIdx.x);
    return at < 0 ? logit_of_none(blockIdx.x) : static_cast<double>(widen(row[at]));
  }
};
template <class T>
DeviceRows<Native<T>> rows_of(const LogitRows<T>& of) {
  return {of.rows, of.cols, native(of.logits), of.targets, of.vocab_begin, of.has_last};
}

// Writes the sums of this block's row. Called by one thread.
__device__ inline void put_sums(double* sums, double sum, double of_target) {
  sums[2 * static_cast<std::int64_t>(blockIdx.x)]     = sum;
  sums[2 * static_cast<std::int64_t>(blockIdx.x) + 1] = of_target;
}

// scale * (softmax - onehot) for one row.
template <class N>
struct Gradient {
  using W = Computed<N>;
  W most, factor, scale;
  std::int64_t target;

  __device__ Gradient(double maximum, double sum, double by, std::int64_t at)
      : most(static_cast<W>(maximum)), factor(static_cast<W>(by / sum)), scale(static_cast<W>(by)), target(at) {}
  // Writes n elements from column j on to `out`, added to `base` if it is not null.
  template <int n>
  __device__ void put(const Pack<N, n>& x, std::int64_t j, N* out, const N* base) const {
    W values[n];
#pragma unroll
    for (int k = 0; k < n; ++k) values[k] = exponential<N>(widen(x.at[k]) - most) * factor;
    if (target >= j && target < j + n) {
#pragma unroll
      for (int k = 0; k < n; ++k) values[k] -= j + k == target ? scale : W(0);
    }
    if (base != nullptr) {
      const Pack<N, n> was = load_pack<n>(base + j);
#pragma unroll
      for (int k = 0; k < n; ++k) values[k] += widen(was.at[k]);
    }
    Pack<N, n> to;
#pragma unroll
    for (int k = 0; k < n; ++k) to.at[k] = narrow_to<N>(values[k]);
    store_whole<n>(out + j, to);
  }
};

__device__ inline double at_step(const LossScale& scale) {
  double by = scale.scale;
  if (scale.all > 0) {
    const std::int64_t counted = scale.all - *scale.ignored;
    by                         = counted > 0 ? by / static_cast<double>(counted) : 0;
  }
  return scale.of_step == nullptr ? by : by * *scale.of_step;
}

// The result for this block's row: combines the sums of all threads, each relative to its own maximum.
struct Finished {
  double most, sum;
  template <class N>
  __device__ explicit Finished(const Softmax<N>& mine) {
    const Computed<N> all = block_most(mine.most);
    most                  = static_cast<double>(all);
    sum                   = block_sum(static_cast<double>(mine.sum * exponential<N>(mine.most - all)));
  }
  __device__ void put(double* maxima, double* sums, double of_target) const {
    if (threadIdx.x != 0) return;
    maxima[blockIdx.x] = most;
    put_sums(sums, sum, of_target);
  }
};

// Enough threads that each has several packs of a long row, and fewer for a short one.
template <class T>
unsigned threads_for(const LogitRows<T>& of) {
  return of.cols >= 4096 ? most_threads : 128;
}

}  // namespace stepgraph::cuda
