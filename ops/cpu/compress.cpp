#include "ops/cpu/compress.hpp"

#include <algorithm>
#include <cstring>

#include "engine/base/dispatch.hpp"
#include "ops/cpu/with_best.hpp"
#include "ops/shared/compress_codes.hpp"

namespace stepgraph {

std::string_view to_string(Compression kind) noexcept {
  switch (kind) {
    case Compression::none:
      return "none";
    case Compression::fp16:
      return "fp16";
    case Compression::bf16:
      return "bf16";
    case Compression::int8:
      return "int8";
    case Compression::dynamic8:
      return "dynamic8";
    case Compression::lossless:
      return "lossless";
  }
  return "?";
}

namespace cpu {
namespace {

using codes::block_elements;
using codes::scale_bytes;

// --- fp16 and bf16 ---------------------------------------------------------------------------------------------------

template <class Half, class T>
void round_elements(const T* __restrict raw, std::byte* packed, std::int64_t count) {
  auto* __restrict to = reinterpret_cast<Half*>(packed);
  for (std::int64_t i = 0; i < count; ++i) to[i] = Half(codes::to_float(raw[i]));
}
template <class Half, class T>
void widen_elements(T* __restrict raw, const std::byte* packed, std::int64_t count) {
  const auto* __restrict from = reinterpret_cast<const Half*>(packed);
  for (std::int64_t i = 0; i < count; ++i) raw[i] = codes::from_float<T>(static_cast<float>(from[i]));
}

// --- blocks of 8 bits ------------------------------------------------------------------------------------------------

template <class Code, class T>
void encode_block(const T* __restrict raw, std::byte* __restrict packed, std::int64_t count) {
  float values[block_elements];
  std::uint32_t largest = 0;  // of the finite magnitudes, which have the order of their bits
  for (std::int64_t i = 0; i < count; ++i) {
    values[i]               = codes::to_float(raw[i]);
    const std::uint32_t one = codes::magnitude_of(values[i]);
    largest = std::max(largest, one & -std::uint32_t{one < codes::infinity_bits});  // without a branch, for vectors
  }
  const float scale = Code::scale(std::bit_cast<float>(largest));
  std::memcpy(packed, &scale, sizeof(scale));
  auto* __restrict to = reinterpret_cast<std::uint8_t*>(packed + scale_bytes);
  for (std::int64_t i = 0; i < count; ++i) to[i] = Code::encode(values[i], scale);
}

constexpr std::array<float, 128> dynamic_magnitudes = codes::Dynamic8::magnitudes();

template <class Code, class T>
void decode_block(T* __restrict raw, const std::byte* __restrict packed, std::int64_t count) {
  float scale;
  std::memcpy(&scale, packed, sizeof(scale));
  const auto* __restrict from = reinterpret_cast<const std::uint8_t*>(packed + scale_bytes);
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<Code, codes::Dynamic8>) {
      raw[i] = codes::from_float<T>(Code::decode(from[i], scale, dynamic_magnitudes.data()));
    } else {
      raw[i] = codes::from_float<T>(Code::decode(from[i], scale));
    }
  }
}

// Calls work(elements, packed, count) for the blocks of elements [begin, end).
template <class T, class Byte, class Work>
void for_blocks(T* raw, Byte* packed, std::int64_t begin, std::int64_t end, const Work& work) {
  for (std::int64_t at = begin; at < end; at += block_elements) {
    work(raw + at, packed + at / block_elements * (scale_bytes + block_elements), std::min(block_elements, end - at));
  }
}

[[noreturn]] void no_kernel(Compression kind) {
  throw Error(ErrorKind::graph, str("compress: no kernel for elements of kind ", to_string(kind)));
}

}  // namespace

void compress_elements(Compression kind, DType type, const std::byte* raw, std::byte* packed, std::int64_t begin,
                       std::int64_t end) {
  dispatch_float(type, [&]<class T>(T) {
    const T* elements = reinterpret_cast<const T*>(raw);
    switch (kind) {
      case Compression::fp16:
        return with_best([&] { round_elements<f16>(elements + begin, packed + 2 * begin, end - begin); });
      case Compression::bf16:
        return with_best([&] { round_elements<bf16>(elements + begin, packed + 2 * begin, end - begin); });
      case Compression::int8:
        return with_best([&] { for_blocks(elements, packed, begin, end, encode_block<codes::Int8, T>); });
      case Compression::dynamic8:
        return with_best([&] { for_blocks(elements, packed, begin, end, encode_block<codes::Dynamic8, T>); });
      default:
        no_kernel(kind);
    }
  });
}

void decompress_elements(Compression kind, DType type, std::byte* raw, const std::byte* packed, std::int64_t begin,
                         std::int64_t end) {
  dispatch_float(type, [&]<class T>(T) {
    T* elements = reinterpret_cast<T*>(raw);
    switch (kind) {
      case Compression::fp16:
        return with_best([&] { widen_elements<f16>(elements + begin, packed + 2 * begin, end - begin); });
      case Compression::bf16:
        return with_best([&] { widen_elements<bf16>(elements + begin, packed + 2 * begin, end - begin); });
      case Compression::int8:
        return with_best([&] { for_blocks(elements, packed, begin, end, decode_block<codes::Int8, T>); });
      case Compression::dynamic8:
        return with_best([&] { for_blocks(elements, packed, begin, end, decode_block<codes::Dynamic8, T>); });
      default:
        no_kernel(kind);
    }
  });
}

}  // namespace cpu
}  // namespace stepgraph
