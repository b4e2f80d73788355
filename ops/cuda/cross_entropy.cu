#include "ops/cuda/cross_entropy.hpp"

#include <algorithm>
#include <type_traits>

#include "ops/cuda/launch.cuh"

namespace stepgraph::cuda {
namespace {

constexpr int most_threads       = 512;
constexpr int most_warps         = most_threads / 32;
constexpr int packs_at_once      = 4;       // of a thread: all on their way before the first is used
constexpr int shared_bytes       = 230000;  // what a block can have for its row, beside what reductions need
constexpr unsigned whole_warp    = 0xffffffffu;
constexpr std::size_t pack_bytes = 16;

template <class N, int n>
struct alignas(n * sizeof(N)) Pack {
  N at[n];
};
template <class N>
constexpr int vector_size = static_cast<int>(pack_bytes / sizeof(N));
template <class N>
using Computed = decltype(widen(N{}));
// What a thread adds up exponentials in: those of two bytes have as many bits in float as they ever need.
template <class N>
using Total = std::conditional_t<sizeof(N) == 2, float, double>;

template <class N>
__device__ Computed<N> exponential(Computed<N> x) {
  if constexpr (sizeof(N) == 2) {
    return __expf(x);
  } else {
    return exp(x);  // of float where x is one
  }
}
template <class W>
__device__ W lowest() {
  return -static_cast<W>(__int_as_float(0x7f800000));
}
__device__ float larger(float a, float b) { return fmaxf(a, b); }  // NaN is none
__device__ double larger(double a, double b) { return fmax(a, b); }

// --- a row -----------------------------------------------------------------------------------------------------------

// A row as packs of n that one load reads, and what is left at both ends: fewer than 2 n elements, one for each of as
// many threads. A thread has the same ones whenever it asks.
template <class N, int n>
struct Row {
  std::int64_t before, packs, left;

  __device__ Row(const N* row, std::int64_t cols) : before(0) {
    if constexpr (n > 1) {
      const std::size_t past = reinterpret_cast<std::size_t>(row) % pack_bytes;
      before                 = past == 0 ? 0 : min(cols, static_cast<std::int64_t>((pack_bytes - past) / sizeof(N)));
    }
    packs = (cols - before) / n;
    left  = cols - packs * n;
  }
  // Of this thread; -1: none.
  [[nodiscard]] __device__ std::int64_t left_over() const {
    const std::int64_t i = threadIdx.x;
    return i >= left ? -1 : i < before ? i : i + packs * n;
  }
  // use(pack, which), with `load(which)` for several of them done before the first.
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

template <int n, class N>
__device__ Pack<N, n> load_pack(const N* from) {
  return *reinterpret_cast<const Pack<N, n>*>(from);
}

// use(pack) for all of a row, in packs of n and of 1.
template <int n, class N, class Use>
__device__ void for_row(const N* row, std::int64_t cols, const Use& use) {
  const Row<N, n> parts(row, cols);
  parts.for_packs([&](std::int64_t i) { return load_pack<n>(row + parts.before + i * n); },
                  [&](const Pack<N, n>& pack, std::int64_t) { use(pack); });
  const std::int64_t left = parts.left_over();
  if (left >= 0) use(load_pack<1>(row + left));
}

// --- what a thread makes of it ---------------------------------------------------------------------------------------

// The largest so far, and the sum of exp(x - largest).
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

// Over all threads of a block, in an order fixed by their number; everybody gets it. `room` is for one of each warp.
template <class W, class Join>
__device__ W block_join(W value, W* room, const Join& join) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value = join(value, __shfl_xor_sync(whole_warp, value, apart));
  __syncthreads();  // the room may still be in use
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
__device__ double block_sum(double value) {
  __shared__ double room[most_warps];
  return block_join(value, room, [](double a, double b) { return a + b; });
}

// --- rows ------------------------------------------------------------------------------------------------------------

// Where a row's target is among its columns; -1: nowhere.
template <class N>
struct Rows {
  std::int64_t cols;
  const N* logits;
  const std::int32_t* targets;
  std::int64_t vocab_begin;
  bool has_last;

  [[nodiscard]] __device__ const N* row() const { return logits + static_cast<std::int64_t>(blockIdx.x) * cols; }
  [[nodiscard]] __device__ std::int64_t target() const {
    const std::int64_t at = targets[blockIdx.x] - vocab_begin;
    return at >= 0 && at < cols ? at : -1;
  }
  [[nodiscard]] __device__ double target_logit(const N* row) const {
    const std::int64_t index = targets[blockIdx.x], at = index - vocab_begin;
    if (index < 0 || (has_last && at >= cols)) return __longlong_as_double(0x7ff8000000000000);  // in no vocabulary
    return at >= 0 && at < cols ? static_cast<double>(widen(row[at])) : 0;
  }
};
template <class T>
Rows<Native<T>> rows_of(const LogitRows<T>& of) {
  return {of.cols, native(of.logits), of.targets, of.vocab_begin, of.has_last};
}

// Of the block's row, by one thread.
__device__ void put_sums(double* sums, double sum, double of_target) {
  sums[2 * static_cast<std::int64_t>(blockIdx.x)]     = sum;
  sums[2 * static_cast<std::int64_t>(blockIdx.x) + 1] = of_target;
}

// scale * (softmax - onehot), of one row.
template <class N>
struct Gradient {
  using W = Computed<N>;
  W most, factor, scale;
  std::int64_t target;

  __device__ Gradient(double maximum, double sum, double by, std::int64_t at)
      : most(static_cast<W>(maximum)), factor(static_cast<W>(by / sum)), scale(static_cast<W>(by)), target(at) {}
  // Of n elements from column j on, at `out`; beside `base`, where it is not null.
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
    *reinterpret_cast<Pack<N, n>*>(out + j) = to;
  }
};

__device__ double at_step(const LossScale& scale) {
  return scale.of_step == nullptr ? scale.scale : scale.scale * *scale.of_step;
}

template <int n, class N>
__global__ void __launch_bounds__(most_threads) maxima_kernel(const Rows<N> of, double* maxima) {
  Computed<N> most = lowest<Computed<N>>();
  for_row<n>(of.row(), of.cols, [&]<int size>(const Pack<N, size>& pack) {
#pragma unroll
    for (int k = 0; k < size; ++k) most = larger(most, widen(pack.at[k]));
  });
  most = block_most(most);
  if (threadIdx.x == 0) maxima[blockIdx.x] = static_cast<double>(most);
}

template <int n, class N>
__global__ void __launch_bounds__(most_threads) sums_kernel(const Rows<N> of, const double* maxima, double* sums) {
  const auto most = static_cast<Computed<N>>(maxima[blockIdx.x]);
  Total<N> sum    = 0;
  for_row<n>(of.row(), of.cols, [&]<int size>(const Pack<N, size>& pack) {
#pragma unroll
    for (int k = 0; k < size; ++k) sum += exponential<N>(widen(pack.at[k]) - most);
  });
  const double all = block_sum(static_cast<double>(sum));
  if (threadIdx.x == 0) put_sums(sums, all, of.target_logit(of.row()));
}

// Of the block's row: all threads' sums, each from its own largest.
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

template <int n, class N>
__global__ void __launch_bounds__(most_threads) softmax_kernel(const Rows<N> of, double* maxima, double* sums) {
  Softmax<N> mine;
  for_row<n>(of.row(), of.cols, [&]<int size>(const Pack<N, size>& pack) { mine.add(pack); });
  Finished(mine).put(maxima, sums, threadIdx.x == 0 ? of.target_logit(of.row()) : 0);
}

// Where `kept`, packs stay in shared memory until they are needed again, each for the thread that loaded it; else they
// are read twice.
template <int n, bool kept, class N>
__global__ void __launch_bounds__(most_threads, 2)
    in_place_kernel(const Rows<N> of, double* maxima, double* sums, const LossScale scale, N* out) {
  extern __shared__ __align__(16) char memory[];
  auto* const room = reinterpret_cast<Pack<N, n>*>(memory);
  N* const row     = out + static_cast<std::int64_t>(blockIdx.x) * of.cols;
  const Row<N, n> parts(row, of.cols);
  const auto from_memory  = [&](std::int64_t i) { return load_pack<n>(row + parts.before + i * n); };
  const std::int64_t left = parts.left_over();
  const double by         = at_step(scale);
  const double of_target  = threadIdx.x == 0 ? of.target_logit(row) : 0;  // before anybody writes over it

  Softmax<N> mine;
  parts.for_packs(from_memory, [&](const Pack<N, n>& pack, std::int64_t i) {
    if constexpr (kept) room[i] = pack;
    mine.add(pack);
  });
  if (left >= 0) mine.add(load_pack<1>(row + left));
  const Finished row_sums(mine);
  row_sums.put(maxima, sums, of_target);

  const Gradient<N> gradient(row_sums.most, row_sums.sum, by, of.target());
  const auto put = [&](const Pack<N, n>& pack, std::int64_t i) {
    gradient.put(pack, parts.before + i * n, row, static_cast<const N*>(nullptr));
  };
  if constexpr (kept) {
    parts.for_packs([&](std::int64_t i) { return room[i]; }, put);
  } else {
    parts.for_packs(from_memory, put);
  }
  if (left >= 0) gradient.put(load_pack<1>(row + left), left, row, static_cast<const N*>(nullptr));
}

template <int n, class N>
__global__ void __launch_bounds__(most_threads)
    gradient_kernel(const Rows<N> of, const double* maxima, const double* sums, const LossScale scale, N* out,
                    const N* base) {
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * of.cols;
  const N* const row       = of.row();
  N* const to              = out + begin;
  const N* const was       = base == nullptr ? nullptr : base + begin;
  const Gradient<N> gradient(maxima[blockIdx.x], sums[2 * static_cast<std::int64_t>(blockIdx.x)], at_step(scale),
                             of.target());
  const Row<N, n> parts(row, of.cols);
  parts.for_packs([&](std::int64_t i) { return load_pack<n>(row + parts.before + i * n); },
                  [&](const Pack<N, n>& pack, std::int64_t i) { gradient.put(pack, parts.before + i * n, to, was); });
  const std::int64_t left = parts.left_over();
  if (left >= 0) gradient.put(load_pack<1>(row + left), left, to, was);
}

// --- the loss --------------------------------------------------------------------------------------------------------

constexpr int loss_threads = 256;

__global__ void __launch_bounds__(loss_threads)
    row_losses_kernel(const double* maxima, const double* sums, std::int64_t rows, double* partial) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * loss_threads + threadIdx.x;
  const double loss    = i < rows ? log(sums[2 * i]) + (maxima[i] - sums[2 * i + 1]) : 0;
  const double all     = block_sum(loss);
  if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

__global__ void __launch_bounds__(loss_threads) loss_kernel(const double* partial, std::int64_t count, double* loss) {
  double mine = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += loss_threads) mine += partial[i];
  const double all = block_sum(mine);
  if (threadIdx.x == 0) *loss = all;
}

// So many that each has several packs of a long row, and few of a short one.
template <class T>
unsigned threads_for(const LogitRows<T>& of) {
  return of.cols >= 4096 ? most_threads : 128;
}

}  // namespace

template <class T>
void cross_entropy_maxima(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima) {
  if (of.rows == 0) return;
  maxima_kernel<vector_size<Native<T>>>
      <<<blocks_for(of.rows, 1), threads_for(of), 0, stream_of(queue)>>>(rows_of(of), maxima);
  check_launch("cross_entropy_maxima");
}

template <class T>
void cross_entropy_sums(const DeviceQueue& queue, const LogitRows<T>& of, const double* maxima, double* sums) {
  if (of.rows == 0) return;
  sums_kernel<vector_size<Native<T>>>
      <<<blocks_for(of.rows, 1), threads_for(of), 0, stream_of(queue)>>>(rows_of(of), maxima, sums);
  check_launch("cross_entropy_sums");
}

template <class T>
void cross_entropy_maxima_and_sums(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums) {
  if (of.rows == 0) return;
  softmax_kernel<vector_size<Native<T>>>
      <<<blocks_for(of.rows, 1), threads_for(of), 0, stream_of(queue)>>>(rows_of(of), maxima, sums);
  check_launch("cross_entropy");
}

template <class T>
void cross_entropy_all_in_place(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums,
                                const LossScale& scale, T* gradient) {
  if (of.rows == 0) return;
  constexpr int n          = vector_size<Native<T>>;
  const std::int64_t bytes = of.cols / n * static_cast<std::int64_t>(pack_bytes);
  const bool kept          = bytes <= shared_bytes;
  const auto kernel        = kept ? &in_place_kernel<n, true, Native<T>> : &in_place_kernel<n, false, Native<T>>;
  const auto shared        = kept ? static_cast<std::size_t>(bytes) : 0;
  if (kept) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "asking for shared memory");
  }
  kernel<<<blocks_for(of.rows, 1), threads_for(of), shared, stream_of(queue)>>>(rows_of(of), maxima, sums, scale,
                                                                                native(gradient));
  check_launch("cross_entropy");
}

template <class T>
void cross_entropy_gradient(const DeviceQueue& queue, const LogitRows<T>& of, const double* maxima, const double* sums,
                            const LossScale& scale, const Into<T>& into) {
  if (of.rows == 0) return;
  // Rows begin at the same place in 16 bytes, or elements are taken one by one.
  const auto place = [](const T* at) { return reinterpret_cast<std::uintptr_t>(at) % pack_bytes; };
  const bool together =
      place(into.out) == place(of.logits) && (into.base == nullptr || place(into.base) == place(of.logits));
  const auto kernel = together ? &gradient_kernel<vector_size<Native<T>>, Native<T>> : &gradient_kernel<1, Native<T>>;
  kernel<<<blocks_for(of.rows, 1), threads_for(of), 0, stream_of(queue)>>>(rows_of(of), maxima, sums, scale,
                                                                           native(into.out), native(into.base));
  check_launch("cross_entropy_gradient");
}

void cross_entropy_total(const DeviceQueue& queue, const double* maxima, const double* sums, std::int64_t rows,
                         double* loss) {
  const unsigned blocks = blocks_for(rows, loss_threads);
  if (queue.workspace.size() < blocks * sizeof(double)) {
    throw Error(ErrorKind::backend, str("cuda: cross_entropy of ", rows, " rows needs ", blocks * sizeof(double),
                                        " bytes of workspace, not ", queue.workspace.size()));
  }
  auto* const partial = reinterpret_cast<double*>(queue.workspace.data());
  if (blocks > 0) row_losses_kernel<<<blocks, loss_threads, 0, stream_of(queue)>>>(maxima, sums, rows, partial);
  check_launch("cross_entropy's losses");
  loss_kernel<<<1, loss_threads, 0, stream_of(queue)>>>(partial, blocks, loss);
  check_launch("cross_entropy's loss");
}

#define STEPGRAPH_CROSS_ENTROPY(T)                                                                            \
  template void cross_entropy_maxima(const DeviceQueue&, const LogitRows<T>&, double*);                       \
  template void cross_entropy_sums(const DeviceQueue&, const LogitRows<T>&, const double*, double*);          \
  template void cross_entropy_maxima_and_sums(const DeviceQueue&, const LogitRows<T>&, double*, double*);     \
  template void cross_entropy_all_in_place(const DeviceQueue&, const LogitRows<T>&, double*, double*,         \
                                           const LossScale&, T*);                                             \
  template void cross_entropy_gradient(const DeviceQueue&, const LogitRows<T>&, const double*, const double*, \
                                       const LossScale&, const Into<T>&)
STEPGRAPH_CROSS_ENTROPY(float);
STEPGRAPH_CROSS_ENTROPY(double);
STEPGRAPH_CROSS_ENTROPY(bf16);
STEPGRAPH_CROSS_ENTROPY(f16);
#undef STEPGRAPH_CROSS_ENTROPY

}  // namespace stepgraph::cuda
