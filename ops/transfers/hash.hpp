#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// A hash to check that two ranks hold the same bits. Not cryptographic. Let m be the finaliser of splitmix64, n the
// number of bytes, and w the bytes as 64-bit words in the machine's byte order, the last one padded with zeros. With
// sums modulo 2^64:
//
//   hash = m(n) + sum over k of m(w[k] + (k + 1) * 0x9e3779b97f4a7c15)
//
// m is a bijection, so a change inside one word is always detected; other changes are missed with probability 2^-64. A
// sum has no order, so the bits do not depend on which thread takes which words.
[[nodiscard]] std::uint64_t hash_bytes(std::span<const std::byte> bytes) noexcept;
// Combines hashes in order into one.
[[nodiscard]] std::uint64_t join_hashes(std::uint64_t so_far, std::uint64_t next) noexcept;
[[nodiscard]] std::string hash_text(std::uint64_t hash);  // 16 hexadecimal digits

// hashes[i] = the hash of values[i]. Each value is one contiguous range; `hashes` holds one i64 per value.
struct HashBytes {
  std::string name  = {};
  LaneKind lane     = LaneKind::compute;
  AccessList values = {};
  Access hashes     = {};
  Labels labels     = {};
};
Node hash_bytes(Graph& graph, const HashBytes& spec);

}  // namespace stepgraph
