#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backends/cursor.hpp"
#include "engine/run/world.hpp"

// Walks and copies the bytes of stretches: concatenated pieces, each a range or strided rows.
namespace stepgraph::loopback {

// Pointer to `length` bytes of a stretch from byte `begin` on if they are contiguous in memory, else null.
[[nodiscard]] inline std::byte* range(const Stretch& stretch, std::int64_t begin, std::int64_t length) noexcept {
  const Cursor cursor(stretch, begin);
  return cursor.length() >= length ? cursor.data() : nullptr;
}

// Copies bytes [begin, begin + length) of one stretch to the same bytes of another. The two are disjoint or identical.
inline void copy(const Stretch& from, const Stretch& to, std::int64_t begin, std::int64_t length) noexcept {
  if (length == 0) return;  // there may be no byte at `begin`
  Cursor source(from, begin), target(to, begin);
  while (length > 0) {
    const std::int64_t count = std::min({length, source.length(), target.length()});
    if (source.data() != target.data()) std::memcpy(target.data(), source.data(), static_cast<std::size_t>(count));
    length -= count;
    source.advance(count, length > 0);
    target.advance(count, length > 0);
  }
}

inline void copy_out(const Stretch& from, std::int64_t begin, std::int64_t length, std::byte* to) noexcept {
  const Piece piece{to, {.length = length}};
  copy({from.pieces, from.begin + begin, length}, {{&piece, 1}, 0, length}, 0, length);
}

inline void copy_in(const std::byte* from, const Stretch& to, std::int64_t begin, std::int64_t length) noexcept {
  const Piece piece{const_cast<std::byte*>(from), {.length = length}};
  copy({{&piece, 1}, 0, length}, {to.pieces, to.begin + begin, length}, 0, length);
}

}  // namespace stepgraph::loopback
