#pragma once
#include <cstdint>

// The masks of ops/shared/dropout_mask.hpp, element for element, with the step number in device memory.
namespace stepgraph::cuda {

__device__ inline std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
__device__ inline std::uint64_t derived_key(std::uint64_t key, std::uint64_t number) {
  return mix_bits(mix_bits(key + 0x9e3779b97f4a7c15u) ^ (number * 0x9e3779b97f4a7c15u + 0xd1b54a32d192ed03u));
}

// A thread's view of a mask. Caches the keys of the last block of 2^32 elements, which is almost always also the next
// one.
class RandomMask {
 public:
  __device__ RandomMask(std::uint64_t site_key, std::int64_t step, std::uint32_t dropped)
      : key_(derived_key(site_key, static_cast<std::uint64_t>(step))), dropped_(dropped) {
    take_block(0);
  }
  __device__ bool keeps(std::uint64_t element) {
    const auto block = static_cast<std::uint32_t>(element >> 32);
    if (block != block_) take_block(block);
    std::uint32_t x = static_cast<std::uint32_t>(element) ^ first_;
    x               = (x ^ (x >> 16)) * 0x7feb352du;
    x               = (x ^ (x >> 15)) + second_;
    x               = x * 0x846ca68bu;
    return (x ^ (x >> 16)) >= dropped_;
  }

 private:
  __device__ void take_block(std::uint32_t block) {
    const std::uint64_t mixed = derived_key(key_, block);
    block_                    = block;
    first_                    = static_cast<std::uint32_t>(mixed);
    second_                   = static_cast<std::uint32_t>(mixed >> 32);
  }

  std::uint64_t key_;
  std::uint32_t dropped_, block_, first_, second_;
};

}  // namespace stepgraph::cuda
