#pragma once
#include <cstdint>

#include "engine/run/world.hpp"

namespace stepgraph {

// A position in a stretch, with the contiguous memory from there on.
class Cursor {
 public:
  Cursor() = default;  // in no stretch
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
  // Advances by at most length(). `more` is false at the end of the stretch.
  void advance(std::int64_t by, bool more) noexcept {
    at_ += by;
    if (more) settle();
  }

 private:
  void settle() noexcept {
    for (; at_ >= piece_->region.num_bytes(); ++piece_) at_ -= piece_->region.num_bytes();
  }

  const Piece* piece_ = nullptr;
  std::int64_t at_    = 0;  // in the piece
};

}  // namespace stepgraph
