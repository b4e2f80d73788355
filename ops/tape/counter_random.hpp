#pragma once
#include <cstdint>
#include <string_view>

// A counter-based random generator. Internal to ops/ and graphs/. The bits depend only on key and counter, not on the
// caller or the order of calls.
namespace stepgraph {

// A 64-bit bijection in which every input bit flips every output bit with probability 1/2 (the finaliser of splitmix64:
// Stafford's variant 13).
[[nodiscard]] constexpr std::uint64_t mix_bits(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Derives a key from another key and a number. Not commutative: (a, b) and (b, a) give different keys.
[[nodiscard]] constexpr std::uint64_t derived_key(std::uint64_t key, std::uint64_t number) noexcept {
  return mix_bits(mix_bits(key + 0x9e3779b97f4a7c15u) ^ (number * 0x9e3779b97f4a7c15u + 0xd1b54a32d192ed03u));
}

// The key of a name: FNV-1a over its bytes, then mixed.
[[nodiscard]] constexpr std::uint64_t name_key(std::string_view name) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3u;
  return mix_bits(hash);
}

// Number `counter` of the stream of `key`: splitmix64 with random access.
[[nodiscard]] constexpr std::uint64_t random_bits(std::uint64_t key, std::uint64_t counter) noexcept {
  return mix_bits(key + (counter + 1) * 0x9e3779b97f4a7c15u);
}

}  // namespace stepgraph
