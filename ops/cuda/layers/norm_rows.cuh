#pragma once
#include <type_traits>

#include "ops/cuda/common/pack.cuh"

// How rows are divided among threads. Internal to ops/cuda/.
namespace stepgraph::cuda {

// The type in which the sums of threads are added: float for 2-byte types, else double. The result is rounded once.
template <class N>
using RowSum = std::conditional_t<sizeof(N) == 2, float, double>;

// `threads` threads share a row, with up to `packs` vectors each: one warp per row, or several warps of a block
// together.
template <int row_threads, int row_packs>
struct RowShape {
  static constexpr int threads = row_threads, packs = row_packs;
  static constexpr int rows_per_block = threads == 32 ? 4 : 1;
  static constexpr int block_threads  = threads * rows_per_block;

  __device__ static std::int64_t row() {
    return threads == 32 ? static_cast<std::int64_t>(blockIdx.x) * rows_per_block + threadIdx.y
                         : static_cast<std::int64_t>(blockIdx.x);
  }
  // The first column of a thread's k-th vector of n.
  __device__ static int column(int k, int n) { return (k * threads + static_cast<int>(threadIdx.x)) * n; }
};

// Calls f with a shape whose threads can hold a row of `vectors` vectors. Returns false if there is none.
template <class Call>
bool with_row_shape(std::int64_t vectors, const Call& f) {
  if (vectors <= 96) return f(RowShape<32, 3>()), true;
  if (vectors <= 128) return f(RowShape<32, 4>()), true;
  if (vectors <= 256) return f(RowShape<64, 4>()), true;
  if (vectors <= 512) return f(RowShape<128, 4>()), true;
  if (vectors <= 1024) return f(RowShape<256, 4>()), true;
  if (vectors <= 2048) return f(RowShape<512, 4>()), true;
  return false;
}

// Sums `count` numbers over the threads of a row; all threads get the results. A kernel calls it once per `shared`
// array. With several warps per row, all threads of the block must call it.
template <int threads, int count, class S>
__device__ void add_up(S (&values)[count], S (&shared)[count][32]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] += __shfl_xor_sync(0xffffffffu, values[i], distance);
  }
  if constexpr (threads > 32) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < count; ++i) shared[i][warp] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < count; ++i) {
      values[i] = shared[i][0];
      for (int w = 1; w < threads / 32; ++w) values[i] += shared[i][w];
    }
  }
}

}  // namespace stepgraph::cuda
