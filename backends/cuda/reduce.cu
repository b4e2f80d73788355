#include "backends/cuda/reduce.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "backends/cuda/check.hpp"
#include "engine/base/dispatch.hpp"

namespace stepgraph::cuda {
namespace {

struct Lists {
  const void* in[max_members];
  void* out[max_members];
  int num_in, num_out;
};

// The type in which elements are computed: 2-byte types in float, integers unsigned where they may wrap.
template <class T>
struct Computed {
  using type = T;
  __device__ static T load(T x) { return x; }
  __device__ static T store(T x) { return x; }
};
template <>
struct Computed<__nv_bfloat16> {
  using type = float;
  __device__ static float load(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
};
template <>
struct Computed<__half> {
  using type = float;
  __device__ static float load(__half x) { return __half2float(x); }
  __device__ static __half store(float x) { return __float2half_rn(x); }
};

template <Reduction reduction, class W>
__device__ W combine(W a, W b) {
  if constexpr (reduction == Reduction::min) {
    if constexpr (std::is_floating_point_v<W>) return b < a || b != b ? b : a;
    return b < a ? b : a;
  } else if constexpr (reduction == Reduction::max) {
    if constexpr (std::is_floating_point_v<W>) return b > a || b != b ? b : a;
    return b > a ? b : a;
  } else if constexpr (std::is_integral_v<W>) {
    using Bits   = std::make_unsigned_t<W>;
    const Bits x = static_cast<Bits>(a), y = static_cast<Bits>(b);
    return static_cast<W>(reduction == Reduction::product ? x * y : x + y);
  } else {
    return reduction == Reduction::product ? a * b : a + b;
  }
}

// Averages of integers use a 64-bit sum.
template <Reduction reduction, class T>
using Sum = std::conditional_t<reduction == Reduction::average && std::is_integral_v<T>, std::int64_t,
                               typename Computed<T>::type>;

template <Reduction reduction, class T>
__global__ void reduce_kernel(Lists lists, std::int64_t count) {
  using W                   = Sum<reduction, T>;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    W total = static_cast<W>(Computed<T>::load(static_cast<const T*>(lists.in[0])[i]));
    for (int k = 1; k < lists.num_in; ++k)
      total = combine<reduction>(total, static_cast<W>(Computed<T>::load(static_cast<const T*>(lists.in[k])[i])));
    if constexpr (reduction == Reduction::average) total = total / static_cast<W>(lists.num_in);
    const T result = Computed<T>::store(static_cast<typename Computed<T>::type>(total));
    for (int k = 0; k < lists.num_out; ++k) static_cast<T*>(lists.out[k])[i] = result;
  }
}

template <class T>
void launch(cudaStream_t stream, const Lists& lists, std::int64_t count, Reduction reduction) {
  constexpr int threads = 256;
  const auto blocks     = static_cast<unsigned>(std::min<std::int64_t>((count + threads - 1) / threads, 1 << 16));
  const auto start      = [&](auto kernel) { kernel<<<blocks, threads, 0, stream>>>(lists, count); };
  switch (reduction) {
    case Reduction::sum:
      return start(reduce_kernel<Reduction::sum, T>);
    case Reduction::average:
      return start(reduce_kernel<Reduction::average, T>);
    case Reduction::min:
      return start(reduce_kernel<Reduction::min, T>);
    case Reduction::max:
      return start(reduce_kernel<Reduction::max, T>);
    case Reduction::product:
      return start(reduce_kernel<Reduction::product, T>);
  }
}

}  // namespace

void reduce(void* stream, std::span<const std::byte* const> in, std::span<std::byte* const> out, std::int64_t num_bytes,
            DType type, Reduction reduction) {
  const std::int64_t count = num_bytes / static_cast<std::int64_t>(size_bytes(type));
  if (count == 0) return;
  if (in.size() > max_members || out.size() > max_members)
    throw Error(ErrorKind::backend, str("cuda: a reduction of ", in.size(), " members (at most ", max_members, ")"));
  Lists lists{};
  lists.num_in  = static_cast<int>(in.size());
  lists.num_out = static_cast<int>(out.size());
  std::copy(in.begin(), in.end(), lists.in);
  std::copy(out.begin(), out.end(), lists.out);
  const auto on = static_cast<cudaStream_t>(stream);
  dispatch(type, [&]<class T>(T) {
    using Element = std::conditional_t<std::is_same_v<T, f16>, __half,
                                       std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat16, T>>;
    launch<Element>(on, lists, count, reduction);
  });
  check(cudaGetLastError(), "launching a reduction");
}

}  // namespace stepgraph::cuda
