#include "ops/cuda/exact_squares.hpp"

#include <algorithm>
#include <type_traits>

#include "ops/cpu/exact_squares.hpp"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/strided.cuh"

namespace stepgraph::cuda {
namespace {

using Limb                      = unsigned long long;  // as atomics have it; read as a signed number
constexpr int limb_bits         = 32;
constexpr Limb limb_mask        = 0xffffffffu;
constexpr unsigned whole_warp   = 0xffffffffu;
constexpr int threads           = 256;
constexpr int elements_per_turn = 16;  // of a thread; sums have room for 32

constexpr int float_limbs  = static_cast<int>(cpu::exact_limbs<float>);
constexpr int double_limbs = static_cast<int>(cpu::exact_limbs<double>);

// limbs (+)= sign * (high * 2^64 + low) * 2^position. What is 0 touches no limb.
__device__ void add_to(Limb* limbs, Limb low, Limb high, int position, bool negative) {
  const int shift = position % limb_bits;
  limbs += position / limb_bits;
  const Limb first = low << shift, second = shift == 0 ? high : (high << shift) | (low >> (64 - shift)),
             third = shift == 0 ? 0 : high >> (64 - shift);
  const Limb pieces[5]{first & limb_mask, first >> limb_bits, second & limb_mask, second >> limb_bits, third};
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    if (pieces[i] != 0) atomicAdd(limbs + i, negative ? Limb(0) - pieces[i] : pieces[i]);
  }
}

// One square by itself, or the count of what is no number.
__device__ __noinline__ void add_one(Limb* limbs, float value) {
  const unsigned bits = __float_as_uint(value), fraction = bits & 0x7fffffu;
  const int exponent = static_cast<int>((bits >> 23) & 0xff);
  if (exponent == 0xff) {
    atomicAdd(limbs + float_limbs + (fraction != 0), Limb(1));
    return;
  }
  const Limb mantissa = fraction | (exponent != 0 ? 0x800000u : 0u);
  add_to(limbs, mantissa * mantissa, 0, 2 * (max(exponent, 1) - 1), false);
}
__device__ void add_one(Limb* limbs, double value) {
  const Limb bits = static_cast<Limb>(__double_as_longlong(value)), fraction = bits & ((Limb(1) << 52) - 1);
  const int exponent = static_cast<int>((bits >> 52) & 0x7ff);
  if (exponent == 0x7ff) {
    atomicAdd(limbs + double_limbs + (fraction != 0), Limb(1));
    return;
  }
  const Limb mantissa = fraction | (exponent != 0 ? Limb(1) << 52 : Limb(0));
  add_to(limbs, mantissa * mantissa, __umul64hi(mantissa, mantissa), 2 * (max(exponent, 1) - 1), false);
}

__device__ long long warp_sum(long long value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_down_sync(whole_warp, value, apart);
  return value;
}

// 2^power, for powers that doubles have.
__device__ double power_of_two(int power) { return __longlong_as_double(static_cast<long long>(1023 + power) << 52); }

// What a warp's threads have summed up and not added to limbs yet: two integers each, of which the first counts units
// at 2 e as limbs count positions, and the second at 2 (e - 23), or at 0.
struct Window {
  static constexpr int bits_below = 22, lowest_position = -298;  // position 0 is worth 2 to that power
  int exponent    = 0;                                           // e; 0: nothing was summed
  long long units = 0, rest = 0;

  [[nodiscard]] __device__ int units_at() const { return 2 * exponent; }
  [[nodiscard]] __device__ int rest_at() const { return max(2 * (exponent - bits_below - 1), 0); }

  // All threads of the warp together.
  __device__ void add_to_limbs(Limb* limbs) {
    if (exponent == 0) return;
    const long long all_units = warp_sum(units), all_rest = warp_sum(rest);
    if (threadIdx.x % 32 == 0) {
      add_to(limbs, static_cast<Limb>(all_units), 0, units_at(), false);
      add_to(limbs, static_cast<Limb>(all_rest < 0 ? -all_rest : all_rest), 0, rest_at(), all_rest < 0);
    }
    units = rest = 0;
  }
};

// The squares of a warp's values, all threads together. As doubles they are exact, and so are their sums: one that
// starts so large that its last bit is worth 4 of the last bits of a largest square (2^51 times that is more than the
// sum of all), and one of what the first had to leave out. Elements more than 2^22 times smaller than the window's
// largest, for all of whose bits even that has no place, are rare, and added one by one.
//
// With e the exponent's bits of the largest value there may be, a largest square's last bit is at 2 (e - 1), the first
// sum's at 2 e, and the second's, below which no square that is summed has bits, at 2 (e - 22 - 1).
__device__ void add_turn(Limb* limbs, Window& window, const float (&values)[elements_per_turn]) {
  constexpr int slack = 4;  // a window stays for values so many powers of two smaller than its largest
  unsigned most       = 0;
#pragma unroll
  for (const float value : values) most = max(most, __float_as_uint(value) & 0x7fffffffu);
  most = __reduce_max_sync(whole_warp, most);
  if (most == 0) return;
  if (most >= 0x7f800000u) {
#pragma unroll
    for (const float value : values) {
      if (value != 0) add_one(limbs, value);
    }
    return;
  }
  const int exponent = max(static_cast<int>(most >> 23), 1);
  if (exponent > window.exponent || exponent + slack < window.exponent) {
    window.add_to_limbs(limbs);
    window.exponent = min(exponent + 1, 0xfe);
  }
  // 1.5 * 2^52 of its units: what is added to that is in the lower half of the mantissa.
  double first = 1.5 * power_of_two(52 + window.units_at() + Window::lowest_position), second = 0;
  const int smallest   = window.exponent - Window::bits_below;
  const unsigned least = smallest > 0 ? static_cast<unsigned>(smallest) << 23 : 1u;
  bool some_left       = false;
#pragma unroll
  for (const float value : values) {
    const bool left   = (__float_as_uint(value) & 0x7fffffffu) - 1 < least - 1;  // 0 is not
    const double wide = left ? 0.0f : value, square = wide * wide, sum = first + square;
    second += square - (sum - first);
    first = sum;
    some_left |= left;
  }
  constexpr long long half = 1ll << 51;
  window.units += (__double_as_longlong(first) & (2 * half - 1)) - half;
  window.rest += __double2ll_rn(second * power_of_two(-window.rest_at() - Window::lowest_position));
  if (some_left) {
#pragma unroll
    for (const float value : values) {
      if ((__float_as_uint(value) & 0x7fffffffu) - 1 < least - 1) add_one(limbs, value);
    }
  }
  __syncwarp();
}

// From the sum of a tile to the sum of all: limbs below 2^32 but for the highest, as the CPU adds them.
template <int num_limbs>
__device__ void carry_and_add(Limb* limbs, Limb* sum) {
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i + 1 < num_limbs; ++i) {
      limbs[i + 1] += static_cast<Limb>(static_cast<long long>(limbs[i]) >> limb_bits);
      limbs[i] &= limb_mask;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_limbs + 2; i += threads) {
    if (limbs[i] != 0) atomicAdd(sum + i, limbs[i]);
  }
}

// Each block has a tile; n values are read at once.
template <int n, class N>
__global__ void __launch_bounds__(threads, 4) squares_kernel(Strided<const N> values, std::int64_t size, Limb* sum) {
  struct alignas(n * sizeof(N)) Pack {
    N at[n];
  };
  __shared__ Limb limbs[float_limbs + 2];
  if (threadIdx.x < float_limbs + 2) limbs[threadIdx.x] = 0;
  __syncthreads();
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * squares_per_tile;
  const std::int64_t end   = min(size, begin + squares_per_tile);
  Window window;
  for (std::int64_t turn = begin; turn < end; turn += threads * elements_per_turn) {
    float wide[elements_per_turn];
#pragma unroll
    for (int pack = 0; pack < elements_per_turn / n; ++pack) {
      const std::int64_t i = turn + (pack * threads + static_cast<int>(threadIdx.x)) * n;
      if (i + n <= end) {
        const Pack loaded = *reinterpret_cast<const Pack*>(values.at(i));
#pragma unroll
        for (int k = 0; k < n; ++k) wide[pack * n + k] = widen(loaded.at[k]);
      } else {
#pragma unroll
        for (int k = 0; k < n; ++k) wide[pack * n + k] = i + k < end ? widen(*values.at(i + k)) : 0.0f;
      }
    }
    add_turn(limbs, window, wide);
  }
  window.add_to_limbs(limbs);
  carry_and_add<float_limbs>(limbs, sum);
}

__global__ void __launch_bounds__(threads)
    double_squares_kernel(Strided<const double> values, std::int64_t size, Limb* sum) {
  __shared__ Limb limbs[double_limbs + 2];
  if (threadIdx.x < double_limbs + 2) limbs[threadIdx.x] = 0;
  __syncthreads();
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * squares_per_tile;
  const std::int64_t end   = min(size, begin + squares_per_tile);
  for (std::int64_t i = begin + threadIdx.x; i < end; i += threads) add_one(limbs, *values.at(i));
  carry_and_add<double_limbs>(limbs, sum);
}

// --- the norm --------------------------------------------------------------------------------------------------------

// As cpu::rounded, of limbs that may be changed: carried, and the highest three rounded once.
template <class T>
__device__ double rounded(Limb* limbs) {
  constexpr int num_limbs   = static_cast<int>(cpu::exact_limbs<T>);
  constexpr int lowest_bits = std::is_same_v<T, float> ? -298 : -2148;  // twice the power of the smallest number
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
  *call.factor = (call.clip == 0 || ratio > 1 ? 1.0 : ratio) / scale;
  if (call.overflow != nullptr) *call.overflow = !isfinite(norm);
}

}  // namespace

template <class T>
void add_squares(const DeviceQueue& queue, const Rows<const T>& values, std::int64_t* sum) {
  const std::int64_t size = values.length * values.count;
  if (size <= 0) return;
  const auto rows       = strided(values);
  const unsigned blocks = blocks_for(size, squares_per_tile);
  auto* const limbs     = reinterpret_cast<Limb*>(sum);
  if constexpr (std::is_same_v<T, double>) {
    double_squares_kernel<<<blocks, threads, 0, stream_of(queue)>>>(rows, size, limbs);
  } else {
    constexpr int n = 16 / static_cast<int>(sizeof(T));
    if (packs_fit<n>(rows)) {
      squares_kernel<n><<<blocks, threads, 0, stream_of(queue)>>>(rows, size, limbs);
    } else {
      squares_kernel<1><<<blocks, threads, 0, stream_of(queue)>>>(rows, size, limbs);
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

template void add_squares(const DeviceQueue&, const Rows<const float>&, std::int64_t*);
template void add_squares(const DeviceQueue&, const Rows<const double>&, std::int64_t*);
template void add_squares(const DeviceQueue&, const Rows<const bf16>&, std::int64_t*);
template void add_squares(const DeviceQueue&, const Rows<const f16>&, std::int64_t*);
template void clip_factor<float>(const DeviceQueue&, const ClipFactorCall&);
template void clip_factor<double>(const DeviceQueue&, const ClipFactorCall&);

}  // namespace stepgraph::cuda
