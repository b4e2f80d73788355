#include "ops/cuda/updates/exact_squares.hpp"

#include <cooperative_groups.h>

#include <array>
#include <atomic>
#include <type_traits>
#include <utility>

#include "ops/cpu/exact_squares.hpp"
#include "ops/cuda/common/pack.cuh"
#include "ops/cuda/common/strided.cuh"

namespace stepgraph::cuda {
namespace {

using Limb                    = unsigned long long;  // the type of atomics; interpreted as signed
constexpr int limb_bits       = 32;
constexpr Limb limb_mask      = 0xffffffffu;
constexpr unsigned whole_warp = 0xffffffffu;
constexpr int threads = 256, warps = threads / 32;

constexpr int float_limbs  = static_cast<int>(cpu::exact_limbs<float>);
constexpr int double_limbs = static_cast<int>(cpu::exact_limbs<double>);

// --- float, and types that widen to float ----------------------------------------------------------------------------

// A thread loads 32 elements at once. A warp's elements are adjacent, since adjacent numbers tend to have similar
// sizes. The blocks of a tile form a cluster and combine their sums before carrying.
constexpr int elements_per_thread = 32, elements_per_warp = 32 * elements_per_thread,
              elements_per_block = warps * elements_per_warp;
constexpr int blocks_per_tile    = static_cast<int>(squares_per_tile / elements_per_block);
static_assert(squares_per_tile % elements_per_block == 0);

// A sum distributed over a warp: the first threads hold one limb each, two more the counts of infinities and NaNs.
struct WarpSum {
  static constexpr int counts = float_limbs;
  static_assert(counts + 2 <= 32);
  int lane;
  long long limb = 0;

  // Adds or subtracts value * 2^position; the arguments are the same in all threads.
  __device__ void add(Limb value, int position, bool negative) {
    const int shift = position - limb_bits * lane;  // from the value's lowest bit to this limb's
    Limb piece      = 0;
    if (shift >= 0 && shift < limb_bits) piece = value << shift;
    if (shift < 0 && shift > -64) piece = value >> -shift;
    piece &= limb_mask;
    limb += static_cast<long long>(negative ? Limb(0) - piece : piece);
  }
  // Adds each thread's own counts.
  __device__ void count(unsigned infinities, unsigned nans) {
    infinities = __reduce_add_sync(whole_warp, infinities);
    nans       = __reduce_add_sync(whole_warp, nans);
    if (lane == counts) limb += infinities;
    if (lane == counts + 1) limb += nans;
  }
  // Carries until all limbs but the highest are below 2^32, as on the CPU. This representation is unique, so carries
  // may be taken in any order: all at once, until there are none.
  __device__ void carry() {
    while (true) {
      const long long over = lane + 1 < float_limbs ? limb >> limb_bits : 0;
      if (!__any_sync(whole_warp, over != 0)) return;
      const long long from_below = __shfl_up_sync(whole_warp, over, 1);
      limb -= over * (1ll << limb_bits);
      if (lane > 0 && lane < float_limbs) limb += from_below;
    }
  }
};

__device__ long long warp_sum(long long value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(whole_warp, value, apart);
  return value;
}

// 2^power, for exponents in the range of double.
__device__ double power_of_two(int power) { return __longlong_as_double(static_cast<long long>(1023 + power) << 52); }

// Adds the squares of a warp's values, given as bits without signs. All threads take part. Squares of floats are exact
// in double, and so are their sums: the first accumulator starts so large that its last bit is worth 4 units of the
// last bit of a largest square (2^51 times that exceeds the total); the second one collects the remainders. Elements
// more than 2^22 times smaller than the largest would not fit; they are left for another round, in which they are the
// largest.
//
// Let e be the biased exponent of the largest. Counted as limb positions, the last bit of a largest square is at 2 (e -
// 1), that of the first accumulator at 2 e, and that of the second at 2 (e - 22 - 1), or 0. No square that is added has
// bits below the latter.
__device__ void add_squares_of(WarpSum& sum, unsigned (&values)[elements_per_thread]) {
  constexpr int bits_below = 22, lowest_position = -298;  // position 0 is worth 2 to this power
  constexpr unsigned infinity = 0x7f800000u;
  while (true) {
    unsigned most = 0;
#pragma unroll
    for (const unsigned value : values) most = max(most, value);
    most = __reduce_max_sync(whole_warp, most);
    if (most == 0) return;
    if (most >= infinity) {
      unsigned infinities = 0, nans = 0;
#pragma unroll
      for (unsigned& value : values) {
        infinities += value == infinity;
        nans += value > infinity;
        if (value >= infinity) value = 0;
      }
      sum.count(infinities, nans);
      continue;
    }
    const int exponent = max(static_cast<int>(most >> 23), 1), smallest = exponent - bits_below;
    const int first_at = 2 * exponent, second_at = max(2 * (smallest - 1), 0);
    const unsigned least = smallest > 0 ? static_cast<unsigned>(smallest) << 23 : 1u;
    // 1.5 * 2^52 of its units: values added to it are in the lower half of the mantissa.
    double first = 1.5 * power_of_two(52 + first_at + lowest_position), second = 0;
    bool some_left = false;
#pragma unroll
    for (const unsigned value : values) {
      const bool in     = value >= least;
      const double wide = __uint_as_float(in ? value : 0), with = __fma_rn(wide, wide, first);
      second += __fma_rn(wide, wide, first - with);
      first = with;
      some_left |= !in && value != 0;
    }
    constexpr long long half = 1ll << 51;
    const long long units    = warp_sum((__double_as_longlong(first) & (2 * half - 1)) - half);
    const long long rest     = warp_sum(__double2ll_rn(second * power_of_two(-second_at - lowest_position)));
    sum.add(static_cast<Limb>(units), first_at, false);
    sum.add(static_cast<Limb>(rest < 0 ? -rest : rest), second_at, rest < 0);
    if (!__any_sync(whole_warp, some_left)) return;
#pragma unroll
    for (unsigned& value : values) {
      if (value >= least) value = 0;
    }
  }
}

// Loads a warp's values, n at a time, as bits without signs; 0 beyond the end.
template <int n, class N>
__device__ void load_values(const Strided<const N>& from, std::int64_t begin, std::int64_t size,
                            unsigned (&values)[elements_per_thread]) {
  constexpr int packs      = elements_per_thread / n;
  const std::int64_t first = begin + static_cast<int>(threadIdx.x % 32) * n;
  Pack<N, n> loaded[packs];
  if (begin + elements_per_warp <= size) {
#pragma unroll
    for (int k = 0; k < packs; ++k) loaded[k] = load_pack<n>(from.at(first + k * 32 * n));
  } else {
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      const std::int64_t i = first + k * 32 * n;
      loaded[k]            = {};
      if (i + n <= size) {
        loaded[k] = load_pack<n>(from.at(i));
      } else {
#pragma unroll
        for (int each = 0; each < n; ++each) {
          if (i + each < size) loaded[k].at[each] = *from.at(i + each);
        }
      }
    }
  }
#pragma unroll
  for (int k = 0; k < packs; ++k) {
#pragma unroll
    for (int each = 0; each < n; ++each)
      values[k * n + each] = __float_as_uint(widen(loaded[k].at[each])) & 0x7fffffffu;
  }
}

// One warp adds up the sums of `count` warps and adds the result to the total.
__device__ void add_up(const long long (*limbs)[32], int count, Limb* sum) {
  WarpSum all{static_cast<int>(threadIdx.x)};
#pragma unroll 8
  for (int warp = 0; warp < count; ++warp) all.limb += limbs[warp][all.lane];
  all.carry();
  if (all.lane < WarpSum::counts + 2 && all.limb != 0) atomicAdd(sum + all.lane, static_cast<Limb>(all.limb));
}

template <int n, class N>
__device__ WarpSum block_squares(const Strided<const N>& values, std::int64_t size, std::int64_t block) {
  unsigned sizes[elements_per_thread];
  WarpSum sum{static_cast<int>(threadIdx.x % 32)};
  const std::int64_t begin = (block * warps + threadIdx.x / 32) * std::int64_t{elements_per_warp};
  if (begin >= size) return sum;  // true for the whole warp
  load_values<n>(values, begin, size, sizes);
  add_squares_of(sum, sizes);
  return sum;
}

// Clusters exist from compute capability 9.0 on. Code for older devices has no cluster dimensions, and is never
// launched (see has_clusters).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define STEPGRAPH_TILE_CLUSTER __cluster_dims__(blocks_per_tile, 1, 1)
#else
#define STEPGRAPH_TILE_CLUSTER
#endif

// One cluster per tile.
template <int n, class N>
__global__ void STEPGRAPH_TILE_CLUSTER __launch_bounds__(threads, 3)
    squares_kernel(const Strided<const N> values, std::int64_t size, Limb* sum) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ long long limbs[blocks_per_tile * warps][32];  // of the whole tile; used in its first block
  const auto cluster = cooperative_groups::this_cluster();
  auto started       = cluster.barrier_arrive();
  const WarpSum mine = block_squares<n>(values, size, blockIdx.x);
  cluster.barrier_wait(std::move(started));  // the first block has started, so its shared memory exists
  const unsigned rank      = cluster.block_rank();
  auto* const of_first     = cluster.map_shared_rank(&limbs[0][0], 0);
  const unsigned at        = (rank * warps + threadIdx.x / 32) * 32;
  of_first[at + mine.lane] = mine.limb;
  cluster.sync();
  if (rank == 0 && threadIdx.x < 32) add_up(limbs, blocks_per_tile * warps, sum);
#endif
}

// Without clusters, one block per tile: the same sums are carried together, so the limbs have the same bits.
template <int n, class N>
__global__ void __launch_bounds__(threads)
    tile_squares_kernel(const Strided<const N> values, std::int64_t size, Limb* sum) {
  __shared__ long long limbs[warps][32];
  WarpSum mine{static_cast<int>(threadIdx.x % 32)};
  for (int block = 0; block < blocks_per_tile; ++block)
    mine.limb += block_squares<n>(values, size, std::int64_t{blockIdx.x} * blocks_per_tile + block).limb;
  limbs[threadIdx.x / 32][mine.lane] = mine.limb;
  __syncthreads();
  if (threadIdx.x < 32) add_up(limbs, warps, sum);
}

// Whether the code that the current device would run has clusters. Code for 8.0 that the driver compiles for a newer
// device has none.
template <int n, class N>
bool has_clusters() {
  static std::array<std::atomic<int>, 64> known{};  // by device; 0: not known, 1: yes, 2: no
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  std::atomic<int>& noted = known[static_cast<std::size_t>(device) % known.size()];
  if (static_cast<std::size_t>(device) >= known.size() || noted == 0) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, squares_kernel<n, N>), "asking for the attributes of a kernel");
    const bool has = attributes.requiredClusterWidth == blocks_per_tile;
    if (static_cast<std::size_t>(device) >= known.size()) return has;
    noted = has ? 1 : 2;
  }
  return noted == 1;
}

// For inputs of at most one block.
template <int n, class N>
__global__ void __launch_bounds__(threads)
    few_squares_kernel(const Strided<const N> values, std::int64_t size, Limb* sum) {
  __shared__ long long limbs[warps][32];
  const WarpSum mine                 = block_squares<n>(values, size, 0);
  limbs[threadIdx.x / 32][mine.lane] = mine.limb;
  __syncthreads();
  if (threadIdx.x < 32) add_up(limbs, warps, sum);
}

template <int n, class N>
void launch_squares(const DeviceQueue& queue, const Strided<const N>& values, std::int64_t size, Limb* sum,
                    bool clusters) {
  if (size <= elements_per_block) {
    few_squares_kernel<n><<<1, threads, 0, stream_of(queue)>>>(values, size, sum);
  } else if (clusters && has_clusters<n, N>()) {
    squares_kernel<n>
        <<<blocks_for(size, squares_per_tile) * blocks_per_tile, threads, 0, stream_of(queue)>>>(values, size, sum);
  } else {
    tile_squares_kernel<n><<<blocks_for(size, squares_per_tile), threads, 0, stream_of(queue)>>>(values, size, sum);
  }
}

// --- double ----------------------------------------------------------------------------------------------------------

// limbs += (high * 2^64 + low) * 2^position. Zero pieces access no limb.
__device__ void add_to(Limb* limbs, Limb low, Limb high, int position) {
  const int shift = position % limb_bits;
  limbs += position / limb_bits;
  const Limb first = low << shift, second = shift == 0 ? high : (high << shift) | (low >> (64 - shift)),
             third = shift == 0 ? 0 : high >> (64 - shift);
  const Limb pieces[5]{first & limb_mask, first >> limb_bits, second & limb_mask, second >> limb_bits, third};
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    if (pieces[i] != 0) atomicAdd(limbs + i, pieces[i]);
  }
}

// Adds one square, or counts an infinity or NaN.
__device__ void add_one(Limb* limbs, double value) {
  const Limb bits = static_cast<Limb>(__double_as_longlong(value)), fraction = bits & ((Limb(1) << 52) - 1);
  const int exponent = static_cast<int>((bits >> 52) & 0x7ff);
  if (exponent == 0x7ff) {
    atomicAdd(limbs + double_limbs + (fraction != 0), Limb(1));
    return;
  }
  const Limb mantissa = fraction | (exponent != 0 ? Limb(1) << 52 : Limb(0));
  add_to(limbs, mantissa * mantissa, __umul64hi(mantissa, mantissa), 2 * (max(exponent, 1) - 1));
}

__global__ void __launch_bounds__(threads)
    double_squares_kernel(Strided<const double> values, std::int64_t size, Limb* sum) {
  __shared__ Limb limbs[double_limbs + 2];
  if (threadIdx.x < double_limbs + 2) limbs[threadIdx.x] = 0;
  __syncthreads();
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * squares_per_tile;
  const std::int64_t end   = min(size, begin + squares_per_tile);
  for (std::int64_t i = begin + threadIdx.x; i < end; i += threads) add_one(limbs, *values.at(i));
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i + 1 < double_limbs; ++i) {
      limbs[i + 1] += limbs[i] >> limb_bits;
      limbs[i] &= limb_mask;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < double_limbs + 2; i += threads) {
    if (limbs[i] != 0) atomicAdd(sum + i, limbs[i]);
  }
}

// --- the norm --------------------------------------------------------------------------------------------------------

// Like cpu::rounded, but may change the limbs: carries them, then rounds the highest three once.
template <class T>
__device__ double rounded(Limb* limbs) {
  constexpr int num_limbs   = static_cast<int>(cpu::exact_limbs<T>);
  constexpr int lowest_bits = std::is_same_v<T, float> ? -298 : -2148;  // twice the exponent of the smallest number
  if (limbs[num_limbs + 1] != 0) return __longlong_as_double(0x7ff8000000000000);
  if (limbs[num_limbs] != 0) return __longlong_as_double(0x7ff0000000000000);
  for (int i = 0; i + 1 < num_limbs; ++i) {
    limbs[i + 1] += static_cast<Limb>(static_cast<long long>(limbs[i]) >> limb_bits);
    limbs[i] &= limb_mask;
  }
  int top = num_limbs - 1;
  while (top >= 0 && limbs[top] == 0) --top;
  if (top < 0) return 0;
  const int lowest = max(top - 2, 0);
  bool below       = false;
  for (int i = 0; i < lowest; ++i) below = below || limbs[i] != 0;
  Limb high = 0, low = 0;  // 128 bits
  for (int i = top; i >= lowest; --i) {
    high = (high << limb_bits) | (low >> limb_bits);
    low  = (low << limb_bits) + limbs[i];
    if (low < limbs[i]) ++high;
  }
  low |= static_cast<Limb>(below);
  double value = __ull2double_rn(low);
  if (high != 0) {
    const int shift = 64 - __clzll(static_cast<long long>(high));
    const Limb head = shift == 64 ? high : (high << (64 - shift)) | (low >> shift);
    const Limb cut  = shift == 64 ? low : low & ((Limb(1) << shift) - 1);
    value           = ldexp(__ull2double_rn(head | static_cast<Limb>(cut != 0)), shift);
  }
  return ldexp(value, limb_bits * lowest + lowest_bits);
}

template <class T>
__global__ void clip_factor_kernel(ClipFactorCall call) {
  constexpr int size = static_cast<int>(cpu::exact_size<T>);
  __shared__ Limb limbs[size];
  if (threadIdx.x < size) limbs[threadIdx.x] = static_cast<Limb>(call.squares[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const double scale = call.scale == nullptr ? 1 : *call.scale;
  const double norm = sqrt(rounded<T>(limbs)) / scale, ratio = call.clip / (norm + 1e-6);
  *call.norm   = norm;
  *call.factor = isfinite(norm) ? (call.clip == 0 || ratio > 1 ? 1.0 : ratio) / scale : nan("");
  if (call.overflow != nullptr) *call.overflow = !isfinite(norm);
}

}  // namespace

template <class T>
void add_squares(const DeviceQueue& queue, const Rows<const T>& values, std::int64_t* sum, bool clusters) {
  const std::int64_t size = values.length * values.count;
  if (size <= 0) return;
  const auto rows   = strided(values);
  auto* const limbs = reinterpret_cast<Limb*>(sum);
  if constexpr (std::is_same_v<T, double>) {
    double_squares_kernel<<<blocks_for(size, squares_per_tile), threads, 0, stream_of(queue)>>>(rows, size, limbs);
  } else {
    constexpr int n = elements_per_vector<T>;
    if (packs_fit<n>(rows)) {
      launch_squares<n>(queue, rows, size, limbs, clusters);
    } else {
      launch_squares<1>(queue, rows, size, limbs, clusters);
    }
  }
  check_launch("add_squares");
}

template <class T>
void clip_factor(const DeviceQueue& queue, const ClipFactorCall& call) {
  static_assert(cpu::exact_size<T> <= threads);
  clip_factor_kernel<T><<<1, threads, 0, stream_of(queue)>>>(call);
  check_launch("clip_factor");
}

template void add_squares(const DeviceQueue&, const Rows<const float>&, std::int64_t*, bool);
template void add_squares(const DeviceQueue&, const Rows<const double>&, std::int64_t*, bool);
template void add_squares(const DeviceQueue&, const Rows<const bf16>&, std::int64_t*, bool);
template void add_squares(const DeviceQueue&, const Rows<const f16>&, std::int64_t*, bool);
template void clip_factor<float>(const DeviceQueue&, const ClipFactorCall&);
template void clip_factor<double>(const DeviceQueue&, const ClipFactorCall&);

}  // namespace stepgraph::cuda
