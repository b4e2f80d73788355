#include "ops/cuda/transfers/compress.hpp"

#include "engine/base/dispatch.hpp"
#include "ops/cuda/common/map.cuh"
#include "ops/shared/compress_codes.hpp"

namespace stepgraph::cuda {
namespace {

using codes::block_elements;
using codes::scale_bytes;

// --- fp16 and bf16 ---------------------------------------------------------------------------------------------------
// With the conversions of engine/base/half.hpp: those of CUDA have other NaNs.

template <class Half, class T>
struct RoundElements {
  const T* raw;
  Half* packed;
  template <int n>
  using Loaded = Pack<T, n>;
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return load_pack<n>(raw + i);
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Pack<Half, n> out;
#pragma unroll
    for (int k = 0; k < n; ++k) out.at[k] = Half(codes::to_float(in.at[k]));
    store_pack<n>(packed + i, out);
  }
};

template <class Half, class T>
struct WidenElements {
  T* raw;
  const Half* packed;
  template <int n>
  using Loaded = Pack<Half, n>;
  template <int n>
  __device__ Loaded<n> load(std::int64_t i) const {
    return load_pack<n>(packed + i);
  }
  template <int n>
  __device__ void finish(std::int64_t i, const Loaded<n>& in) const {
    Pack<T, n> out;
#pragma unroll
    for (int k = 0; k < n; ++k) out.at[k] = codes::from_float<T>(static_cast<float>(in.at[k]));
    store_pack<n>(raw + i, out);
  }
};

// --- blocks of 8 bits ------------------------------------------------------------------------------------------------
// One warp for each block. A lane has `per_lane` neighbouring elements of each half of the block.

constexpr int warp = 32, per_lane = 4, halves = 2, threads = 256, warps = threads / warp;
static_assert(warp * per_lane * halves == block_elements);

struct BlockPlace {
  std::int64_t first;  // element
  int count;           // elements
  std::int64_t at;     // of its scale in the packed bytes
};
__device__ BlockPlace place(std::int64_t block, std::int64_t count) {
  const std::int64_t first = block * block_elements, left = count - first;
  return {first, left < block_elements ? static_cast<int>(left) : static_cast<int>(block_elements),
          block * (scale_bytes + block_elements)};
}

template <class Code, bool vectors, class T>
__global__ void __launch_bounds__(threads) encode_kernel(const T* raw, std::uint8_t* packed, std::int64_t count) {
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / warp;
  if (block * block_elements >= count) return;  // all lanes of a warp
  const int lane      = threadIdx.x % warp;
  const BlockPlace of = place(block, count);
  float values[halves][per_lane];
  std::uint32_t largest = 0;
#pragma unroll
  for (int h = 0; h < halves; ++h) {
    const int first = (h * warp + lane) * per_lane;
    Pack<T, per_lane> loaded{};
    if (vectors && first + per_lane <= of.count) {
      loaded = load_pack<per_lane>(raw + of.first + first);
    } else {
#pragma unroll
      for (int k = 0; k < per_lane; ++k) {
        if (first + k < of.count) loaded.at[k] = raw[of.first + first + k];
      }
    }
#pragma unroll
    for (int k = 0; k < per_lane; ++k) {
      values[h][k]            = codes::to_float(loaded.at[k]);
      const std::uint32_t one = codes::magnitude_of(values[h][k]);
      largest                 = max(largest, one < codes::infinity_bits ? one : 0u);
    }
  }
  largest           = __reduce_max_sync(~0u, largest);
  const float scale = Code::scale(std::bit_cast<float>(largest));
  if (lane == 0) *reinterpret_cast<float*>(packed + of.at) = scale;
#pragma unroll
  for (int h = 0; h < halves; ++h) {
    const int first  = (h * warp + lane) * per_lane;
    std::uint8_t* to = packed + of.at + scale_bytes + first;
    Pack<std::uint8_t, per_lane> out;
#pragma unroll
    for (int k = 0; k < per_lane; ++k) out.at[k] = Code::encode(values[h][k], scale);
    if (first + per_lane <= of.count) {
      store_pack<per_lane>(to, out);
    } else {
#pragma unroll
      for (int k = 0; k < per_lane; ++k) {
        if (first + k < of.count) to[k] = out.at[k];
      }
    }
  }
}

struct Magnitudes {
  std::array<float, 128> at;
};
__constant__ constexpr Magnitudes dynamic_magnitudes{codes::Dynamic8::magnitudes()};

template <class Code, bool vectors, class T>
__global__ void __launch_bounds__(threads) decode_kernel(T* raw, const std::uint8_t* packed, std::int64_t count) {
  constexpr bool dynamic = std::is_same_v<Code, codes::Dynamic8>;
  __shared__ float magnitudes[dynamic ? 128 : 1];  // lanes read different ones, which is slow in constant memory
  if constexpr (dynamic) {
    if (threadIdx.x < 128) magnitudes[threadIdx.x] = dynamic_magnitudes.at[threadIdx.x];
    __syncthreads();
  }
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / warp;
  if (block * block_elements >= count) return;
  const int lane      = threadIdx.x % warp;
  const BlockPlace of = place(block, count);
  const float scale   = *reinterpret_cast<const float*>(packed + of.at);
#pragma unroll
  for (int h = 0; h < halves; ++h) {
    const int first          = (h * warp + lane) * per_lane;
    const std::uint8_t* from = packed + of.at + scale_bytes + first;
    Pack<std::uint8_t, per_lane> in{};
    if (first + per_lane <= of.count) {
      in = load_pack<per_lane>(from);
    } else {
#pragma unroll
      for (int k = 0; k < per_lane; ++k) {
        if (first + k < of.count) in.at[k] = from[k];
      }
    }
    Pack<T, per_lane> out;
#pragma unroll
    for (int k = 0; k < per_lane; ++k) {
      if constexpr (dynamic) {
        out.at[k] = codes::from_float<T>(Code::decode(in.at[k], scale, magnitudes));
      } else {
        out.at[k] = codes::from_float<T>(Code::decode(in.at[k], scale));
      }
    }
    if (vectors && first + per_lane <= of.count) {
      store_pack<per_lane>(raw + of.first + first, out);
    } else {
#pragma unroll
      for (int k = 0; k < per_lane; ++k) {
        if (first + k < of.count) raw[of.first + first + k] = out.at[k];
      }
    }
  }
}

template <class Call>
void with_vectors(bool fit, const Call& call) {
  fit ? call(std::true_type{}) : call(std::false_type{});
}

template <class Code, class T>
void encode(const DeviceQueue& queue, const T* raw, std::uint8_t* packed, std::int64_t count) {
  with_vectors(vectors_fit(raw), [&](auto vectors) {
    encode_kernel<Code, vectors>
        <<<blocks_for(count, warps * block_elements), threads, 0, stream_of(queue)>>>(raw, packed, count);
  });
  check_launch("compress");
}
template <class Code, class T>
void decode(const DeviceQueue& queue, T* raw, const std::uint8_t* packed, std::int64_t count) {
  with_vectors(vectors_fit(raw), [&](auto vectors) {
    decode_kernel<Code, vectors>
        <<<blocks_for(count, warps * block_elements), threads, 0, stream_of(queue)>>>(raw, packed, count);
  });
  check_launch("decompress");
}

template <class Half, class T>
void round_into(const DeviceQueue& queue, const T* raw, std::byte* packed, std::int64_t count) {
  auto* to = reinterpret_cast<Half*>(packed);
  map<8>(queue, "compress", RoundElements<Half, T>{raw, to}, count, vectors_fit(raw, to));
}
template <class Half, class T>
void widen_into(const DeviceQueue& queue, T* raw, const std::byte* packed, std::int64_t count) {
  const auto* from = reinterpret_cast<const Half*>(packed);
  map<8>(queue, "decompress", WidenElements<Half, T>{raw, from}, count, vectors_fit(raw, from));
}

[[noreturn]] void no_kernel(Compression kind) {
  throw Error(ErrorKind::graph, str("compress: no kernel on a device for ", to_string(kind)));
}

}  // namespace

void compress_elements(const DeviceQueue& queue, Compression kind, DType type, const std::byte* raw, std::byte* packed,
                       std::int64_t count) {
  if (count == 0) return;
  dispatch_float(type, [&]<class T>(T) {
    const T* elements = reinterpret_cast<const T*>(raw);
    auto* bytes       = reinterpret_cast<std::uint8_t*>(packed);
    switch (kind) {
      case Compression::fp16:
        return round_into<f16>(queue, elements, packed, count);
      case Compression::bf16:
        return round_into<bf16>(queue, elements, packed, count);
      case Compression::int8:
        return encode<codes::Int8>(queue, elements, bytes, count);
      case Compression::dynamic8:
        return encode<codes::Dynamic8>(queue, elements, bytes, count);
      default:
        no_kernel(kind);
    }
  });
}

void decompress_elements(const DeviceQueue& queue, Compression kind, DType type, std::byte* raw,
                         const std::byte* packed, std::int64_t count) {
  if (count == 0) return;
  dispatch_float(type, [&]<class T>(T) {
    T* elements       = reinterpret_cast<T*>(raw);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(packed);
    switch (kind) {
      case Compression::fp16:
        return widen_into<f16>(queue, elements, packed, count);
      case Compression::bf16:
        return widen_into<bf16>(queue, elements, packed, count);
      case Compression::int8:
        return decode<codes::Int8>(queue, elements, bytes, count);
      case Compression::dynamic8:
        return decode<codes::Dynamic8>(queue, elements, bytes, count);
      default:
        no_kernel(kind);
    }
  });
}

}  // namespace stepgraph::cuda
