#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "engine/graph/graph.hpp"

namespace stepgraph {

// A hash of bytes that tells whether two ranks hold the same bits; no secret, and no defence against somebody who wants
// two things to look alike. With m the finisher of splitmix64, n bytes as 64-bit words w of the machine's order (the
// last one filled up with zeros), and sums modulo 2^64:
//
//   hash = m(n) + sum over k of m(w[k] + (k + 1) * 0x9e3779b97f4a7c15)
//
// m is one to one, so that a change inside one word always shows; others are missed once in 2^64. A sum has no order:
// the bits do not depend on which thread takes which words.
[[nodiscard]] std::uint64_t hash_bytes(std::span<const std::byte> bytes) noexcept;
// Of hashes in their order: one for all of them.
[[nodiscard]] std::uint64_t join_hashes(std::uint64_t so_far, std::uint64_t next) noexcept;
[[nodiscard]] std::string hash_text(std::uint64_t hash);  // 16 hexadecimal digits

// hashes[i] = the hash of values[i], each one range of bytes. `hashes` are as many i64.
struct HashBytes {
  std::string name  = {};
  LaneKind lane     = LaneKind::compute;
  AccessList values = {};
  Access hashes     = {};
  Labels labels     = {};
};
Node hash_bytes(Graph& graph, const HashBytes& spec);

}  // namespace stepgraph
