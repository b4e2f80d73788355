#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "engine/world.hpp"

// Walking and copying the bytes of stretches: pieces laid end to end, each a range or rows of one.
namespace stepgraph::loopback {

// Where a walk through a stretch is: the memory from here on that is one range.
class Cursor {
 public:
  Cursor(const Stretch& stretch, std::int64_t begin) noexcept
      : piece_(stretch.pieces.data()), at_(stretch.begin + begin) {
    settle();
  }
  [[nodiscard]] std::byte* data() const noexcept {
    const Region& region = piece_->region;
    if (region.count == 1) return piece_->data + at_;
    return piece_->data + at_ / region.length * region.stride + at_ % region.length;
  }
  [[nodiscard]] std::int64_t length() const noexcept {
    return piece_->region.length - (piece_->region.count == 1 ? at_ : at_ % piece_->region.length);
  }
  // By at most length(); not beyond the end of the stretch unless nothing follows.
  void advance(std::int64_t by, bool more) noexcept {
    at_ += by;
    if (more) settle();
  }

 private:
  void settle() noexcept {
    for (; at_ >= piece_->region.num_bytes(); ++piece_) at_ -= piece_->region.num_bytes();
  }

  const Piece* piece_;
  std::int64_t at_;  // in the piece
};

// `length` bytes of a stretch from byte `begin` on, if they are one range in memory; else null.
[[nodiscard]] inline std::byte* range(const Stretch& stretch, std::int64_t begin, std::int64_t length) noexcept {
  const Cursor cursor(stretch, begin);
  return cursor.length() >= length ? cursor.data() : nullptr;
}

// Bytes [begin, begin + length) of one stretch to the same bytes of another. They are apart, or at the same place.
inline void copy(const Stretch& from, const Stretch& to, std::int64_t begin, std::int64_t length) noexcept {
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
