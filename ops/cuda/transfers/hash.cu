#include "ops/cuda/transfers/hash.hpp"

#include <algorithm>

#include "ops/cuda/common/launch.cuh"

namespace stepgraph::cuda {
namespace {

using Word                     = unsigned long long;
constexpr int threads          = 256;
constexpr int words_at_once    = 8;     // per thread
constexpr unsigned most_blocks = 1024;  // limits the number of atomic additions

__device__ Word mix(Word z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
__device__ Word mixed(Word word, std::int64_t k) {
  return mix(word + static_cast<Word>(k + 1) * 0x9e3779b97f4a7c15ull);
}

__device__ Word word_of(const unsigned char* bytes, int count) {
  Word word = 0;
  for (int i = 0; i < count; ++i) word |= static_cast<Word>(bytes[i]) << (8 * i);
  return word;
}

// Adds to the hash, which is initially 0. Integer addition: the order does not matter.
template <bool aligned>
__global__ void __launch_bounds__(threads) hash_kernel(const unsigned char* bytes, std::int64_t size, Word* hash) {
  const std::int64_t words = size / 8, step = static_cast<std::int64_t>(gridDim.x) * threads,
                     mine = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  const auto word         = [&](std::int64_t k) {
    if constexpr (aligned) return reinterpret_cast<const Word*>(bytes)[k];
    return word_of(bytes + 8 * k, 8);
  };
  Word sum = 0;
  for (std::int64_t begin = mine; begin < words; begin += words_at_once * step) {
    Word loaded[words_at_once];
#pragma unroll
    for (int i = 0; i < words_at_once; ++i) loaded[i] = begin + i * step < words ? word(begin + i * step) : 0;
#pragma unroll
    for (int i = 0; i < words_at_once; ++i) {
      if (begin + i * step < words) sum += mixed(loaded[i], begin + i * step);
    }
  }
  if (mine == 0) {
    sum += mix(static_cast<Word>(size));
    if (size % 8 != 0) sum += mixed(word_of(bytes + 8 * words, static_cast<int>(size % 8)), words);
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_down_sync(0xffffffffu, sum, apart);
  if (threadIdx.x % 32 == 0) atomicAdd(hash, sum);
}

}  // namespace

void hash_bytes(const DeviceQueue& queue, std::span<const std::byte> bytes, std::int64_t* hash) {
  check_cuda(cudaMemsetAsync(hash, 0, sizeof(*hash), stream_of(queue)), "clearing a hash");
  const auto* const first = reinterpret_cast<const unsigned char*>(bytes.data());
  const auto size         = static_cast<std::int64_t>(bytes.size());
  const unsigned blocks   = std::clamp(blocks_for(size / 8, threads * words_at_once), 1u, most_blocks);
  const bool aligned      = reinterpret_cast<std::uintptr_t>(first) % sizeof(Word) == 0;
  const auto kernel       = aligned ? &hash_kernel<true> : &hash_kernel<false>;
  kernel<<<blocks, threads, 0, stream_of(queue)>>>(first, size, reinterpret_cast<Word*>(hash));
  check_launch("hash_bytes");
}

}  // namespace stepgraph::cuda
