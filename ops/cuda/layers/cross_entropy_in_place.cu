#include <cuda_pipeline.h>

#include <algorithm>

#include "ops/cuda/layers/cross_entropy_rows.cuh"

namespace stepgraph::cuda {
namespace {

// Shared memory of a block for its row, beside that for reductions: 230000 bytes from compute capability 9.0 on, less
// on older devices.
int row_bytes_of_block() {
  constexpr int most = 230000, reductions = 2448;
  int device = 0, there = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  check_cuda(cudaDeviceGetAttribute(&there, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "asking for shared memory");
  return std::min(most, there - reductions);
}

// --- 2-byte types: a row is in shared memory while the next row is being loaded --------------------------------------

// Two numbers at a time, as their bits: there are instructions for pairs.
template <class N>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  __device__ static float2 widen(unsigned x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }
  __device__ static unsigned narrow(float2 x) { return bits(__floats2bfloat162_rn(x.x, x.y)); }
  __device__ static unsigned larger(unsigned a, unsigned b) { return bits(__hmax2(pair(a), pair(b))); }  // skips NaN
  __device__ static unsigned bits(__nv_bfloat162 x) { return *reinterpret_cast<const unsigned*>(&x); }
  __device__ static __nv_bfloat162 pair(unsigned x) { return *reinterpret_cast<const __nv_bfloat162*>(&x); }
};
template <>
struct PairOf<__half> {
  __device__ static float2 widen(unsigned x) { return __half22float2(pair(x)); }
  __device__ static unsigned narrow(float2 x) { return bits(__floats2half2_rn(x.x, x.y)); }
  __device__ static unsigned larger(unsigned a, unsigned b) { return bits(__hmax2(pair(a), pair(b))); }
  __device__ static unsigned bits(__half2 x) { return *reinterpret_cast<const unsigned*>(&x); }
  __device__ static __half2 pair(unsigned x) { return *reinterpret_cast<const __half2*>(&x); }
};
constexpr int pairs_per_vector = 4, elements = 2 * pairs_per_vector;

// The numbers of a vector, widened.
template <class N>
struct Widened {
  float2 at[pairs_per_vector];
  __device__ explicit Widened(uint4 x)
      : at{PairOf<N>::widen(x.x), PairOf<N>::widen(x.y), PairOf<N>::widen(x.z), PairOf<N>::widen(x.w)} {}
};

// The running maximum, and the sum of exp(x - maximum).
struct QuickSoftmax {
  float most = lowest<float>();
  float from = 0;  // the maximum; 0 before the first element
  float sum  = 0;

  __device__ void see(float most_here) {
    if (most_here > most) {
      sum *= quick_exponential(most - most_here);
      most = from = most_here;
    }
  }
  template <class N>
  __device__ void add(uint4 x) {
    using Pair      = PairOf<N>;
    const float2 of = Pair::widen(Pair::larger(Pair::larger(x.x, x.y), Pair::larger(x.z, x.w)));
    see(larger(of.x, of.y));
    const Widened<N> wide(x);
#pragma unroll
    for (const float2& pair : wide.at) {
      sum += quick_exponential(pair.x - from);
      sum += quick_exponential(pair.y - from);
    }
  }
  __device__ void add(float x) {
    see(x);
    sum += quick_exponential(x - from);
  }
  // Combines the values of a warp; all of its threads get the result.
  __device__ void join_warp() {
    const float before = most;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) most = larger(most, __shfl_xor_sync(whole_warp, most, apart));
    if (before > lowest<float>()) sum *= quick_exponential(before - most);
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(whole_warp, sum, apart);
  }
  // Combines the values of a block. `room` has one element per warp and is in use until the next block barrier.
  __device__ void join_block(float2* room) {
    join_warp();
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) room[warp] = {most, sum};
    __syncthreads();
    const float2 of_warp = lane < blockDim.x / 32 ? room[lane] : float2{lowest<float>(), 0};
    most                 = of_warp.x;
    sum                  = of_warp.y;
    join_warp();
  }
};

// scale * (softmax - onehot) of one row, in place. Also writes the target's logit to `of_target`.
struct QuickGradient {
  float most, factor, scale;
  int target;  // -1: not among these columns
  double* of_target;

  __device__ float of(float x) const { return quick_exponential(x - most) * factor; }
  __device__ void subtract(float x, float& value) const {
    *of_target = static_cast<double>(x);
    value -= scale;
  }

  template <class N>
  __device__ void put(uint4 x, int j, N* row) const {
    const Widened<N> wide(x);
    float2 values[pairs_per_vector];
#pragma unroll
    for (int k = 0; k < pairs_per_vector; ++k) values[k] = {of(wide.at[k].x), of(wide.at[k].y)};
    if (static_cast<unsigned>(target - j) < elements) {
#pragma unroll
      for (int k = 0; k < pairs_per_vector; ++k) {
        if (target == j + 2 * k) subtract(wide.at[k].x, values[k].x);
        if (target == j + 2 * k + 1) subtract(wide.at[k].y, values[k].y);
      }
    }
    using Pair = PairOf<N>;
    __stwb(reinterpret_cast<uint4*>(row + j),
           uint4{Pair::narrow(values[0]), Pair::narrow(values[1]), Pair::narrow(values[2]), Pair::narrow(values[3])});
  }
  template <class N>
  __device__ void put(float x, int j, N* row) const {
    float value = of(x);
    if (target == j) subtract(x, value);
    row[j] = narrow_to<N>(value);
  }
};

// Each block processes every gridDim.x-th row. Vectors are copied to shared memory asynchronously, and only the thread
// that requested a vector reads it, so threads synchronize once per row, for its sum. When the gradient of a vector is
// done, its place is reused for the next row, so that memory is read all the time.
//
// Threads wait for their vectors of a row in groups: the first quarter, then the second, and so on.
constexpr int num_groups = 4;

template <class N>
__global__ void __launch_bounds__(most_threads, 2)
    resident_kernel(const DeviceRows<N> of, double* maxima, double* sums, const LossScale loss_scale, N* out) {
  extern __shared__ __align__(16) char memory[];
  __shared__ float2 of_warps[2][most_warps];
  auto* const room  = reinterpret_cast<uint4*>(memory);
  const int threads = static_cast<int>(blockDim.x);
  // Vectors per thread and group.
  const int turns = static_cast<int>((of.cols / elements + threads * num_groups - 1) / (threads * num_groups));
  const int first = static_cast<int>(threadIdx.x);

  const auto for_group = [&](int group, int vectors, const auto& use) {
    int i = first + group * turns * threads;
    for (int turn = 0; turn < turns && i < vectors; ++turn, i += threads) use(i);
  };
  const auto fetch = [&](std::int64_t row, int group) {
    if (row < of.rows) {
      const N* const from = out + row * of.cols;
      const Row<N, elements> parts(from, of.cols);
      for_group(group, static_cast<int>(parts.packs),
                [&](int i) { __pipeline_memcpy_async(room + i, from + parts.before + i * elements, vector_bytes); });
    }
    __pipeline_commit();  // the same number of groups for every row, even if some are empty
  };

  std::int64_t row   = blockIdx.x;
  const auto of_step = static_cast<float>(at_step(loss_scale));
  for (int group = 0; group < num_groups; ++group) fetch(row, group);
  for (int parity = 0; row < of.rows; row += gridDim.x, parity ^= 1) {
    N* const at = out + row * of.cols;
    const Row<N, elements> parts(at, of.cols);
    const int before = static_cast<int>(parts.before), vectors = static_cast<int>(parts.packs),
              target = static_cast<int>(of.target(row)), left = static_cast<int>(parts.left_over());
    const float left_over = left >= 0 ? widen(at[left]) : 0;
    const float by        = of.counts(row) ? of_step : 0;

    QuickSoftmax softmax;
#pragma unroll
    for (int group = 0; group < num_groups; ++group) {
      __pipeline_wait_prior(num_groups - 1 - group);
      for_group(group, vectors, [&](int i) { softmax.template add<N>(room[i]); });
    }
    if (left >= 0) softmax.add(left_over);
    softmax.join_block(of_warps[parity]);
    if (threadIdx.x == 0) {
      maxima[row]   = static_cast<double>(softmax.most);
      sums[2 * row] = static_cast<double>(softmax.sum);
      if (target < 0) sums[2 * row + 1] = of.logit_of_none(row);
    }

    const QuickGradient gradient{softmax.most, by / softmax.sum, by, target, sums + 2 * row + 1};
    for (int group = 0; group < num_groups; ++group) {
      for_group(group, vectors, [&](int i) { gradient.put(room[i], before + i * elements, at); });
      fetch(row + gridDim.x, group);
    }
    if (left >= 0) gradient.put(left_over, left, at);
  }
}

// --- all other types and sizes ---------------------------------------------------------------------------------------

// If `kept`, packs stay in shared memory until they are needed again, each for the thread that loaded it. Otherwise
// they are read twice.
template <int n, bool kept, class N>
__global__ void __launch_bounds__(most_threads, 2)
    in_place_kernel(const DeviceRows<N> of, double* maxima, double* sums, const LossScale scale, N* out) {
  extern __shared__ __align__(16) char memory[];
  auto* const room = reinterpret_cast<Pack<N, n>*>(memory);
  N* const row     = out + static_cast<std::int64_t>(blockIdx.x) * of.cols;
  const Row<N, n> parts(row, of.cols);
  const auto from_memory  = [&](std::int64_t i) { return load_pack<n>(row + parts.before + i * n); };
  const std::int64_t left = parts.left_over();
  const double by         = of.counts(blockIdx.x) ? at_step(scale) : 0;
  const double of_target  = threadIdx.x == 0 ? of.target_logit(row) : 0;  // before any thread overwrites it

  Softmax<N> mine;
  parts.for_packs(from_memory, [&](const Pack<N, n>& pack, std::int64_t i) {
    if constexpr (kept) room[i] = pack;
    mine.add(pack);
  });
  if (left >= 0) mine.add(load_pack<1>(row + left));
  const Finished row_sums(mine);
  row_sums.put(maxima, sums, of_target);

  const Gradient<N> gradient(row_sums.most, row_sums.sum, by, of.target(blockIdx.x));
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

template <class T>
void launch_resident(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums,
                     const LossScale& scale, T* gradient, int shared_bytes) {
  const auto kernel      = &resident_kernel<Native<T>>;
  const unsigned threads = threads_for(of);
  const auto shared      = static_cast<std::size_t>(of.cols / elements) * vector_bytes;
  int per_multiprocessor = 0;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "asking for shared memory");
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      "asking for all shared memory");
  check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, static_cast<int>(threads), shared),
      "asking for the number of resident blocks");
  const std::int64_t resident = std::max<std::int64_t>(1, per_multiprocessor) * num_multiprocessors();
  kernel<<<blocks_for(std::min(of.rows, resident), 1), threads, shared, stream_of(queue)>>>(rows_of(of), maxima, sums,
                                                                                            scale, native(gradient));
  check_launch("cross_entropy");
}

template <class T>
void launch_any(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums, const LossScale& scale,
                T* gradient, int shared_bytes) {
  constexpr int n          = elements_per_vector<T>;
  const std::int64_t bytes = of.cols / n * static_cast<std::int64_t>(vector_bytes);
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

}  // namespace

template <class T>
void cross_entropy_all_in_place(const DeviceQueue& queue, const LogitRows<T>& of, double* maxima, double* sums,
                                const LossScale& scale, T* gradient) {
  if (of.rows == 0) return;
  const int shared_bytes = row_bytes_of_block();
  if constexpr (sizeof(T) == 2) {
    if (of.cols / elements * static_cast<std::int64_t>(vector_bytes) <= shared_bytes)
      return launch_resident(queue, of, maxima, sums, scale, gradient, shared_bytes);
  }
  launch_any(queue, of, maxima, sums, scale, gradient, shared_bytes);
}

#define STEPGRAPH_CROSS_ENTROPY(T)                                                                    \
  template void cross_entropy_all_in_place(const DeviceQueue&, const LogitRows<T>&, double*, double*, \
                                           const LossScale&, T*)
STEPGRAPH_CROSS_ENTROPY(float);
STEPGRAPH_CROSS_ENTROPY(double);
STEPGRAPH_CROSS_ENTROPY(bf16);
STEPGRAPH_CROSS_ENTROPY(f16);
#undef STEPGRAPH_CROSS_ENTROPY

}  // namespace stepgraph::cuda
