#include "graphs/step/offload/bytes.hpp"

#include <algorithm>
#include <utility>

namespace stepgraph::offload {

void ByteSet::add(ByteInterval range) {
  if (range.begin >= range.end) return;
  // The ranges that the new one touches become one with it.
  const auto first = std::lower_bound(ranges_.begin(), ranges_.end(), range.begin,
                                      [](const ByteInterval& of, std::int64_t at) { return of.end < at; });
  auto last        = first;
  for (; last != ranges_.end() && last->begin <= range.end; ++last) {
    range.begin = std::min(range.begin, last->begin);
    range.end   = std::max(range.end, last->end);
  }
  ranges_.insert(ranges_.erase(first, last), range);
}

void ByteSet::append(ByteInterval range) {
  if (!ranges_.empty() && range.begin <= ranges_.back().end) {
    ranges_.back().end = std::max(ranges_.back().end, range.end);
  } else {
    ranges_.push_back(range);
  }
}

// Merges both lists, in linear time: sets can have a range for each row of a matrix.
void ByteSet::add(const ByteSet& other) {
  if (other.ranges_.size() == 1) return add(other.ranges_.front());
  ByteSet all;
  all.ranges_.reserve(ranges_.size() + other.ranges_.size());
  auto mine = ranges_.begin();
  for (const ByteInterval& range : other.ranges_) {
    for (; mine != ranges_.end() && mine->begin <= range.begin; ++mine) all.append(*mine);
    all.append(range);
  }
  for (; mine != ranges_.end(); ++mine) all.append(*mine);
  ranges_ = std::move(all.ranges_);
}

void ByteSet::add(const Region& region) {
  if (region.num_bytes() == 0) return;
  ByteSet rows;
  rows.ranges_.reserve(static_cast<std::size_t>(region.count));
  for (std::int64_t row = 0; row < region.count; ++row) {
    const std::int64_t begin = region.offset + row * region.stride;
    rows.append({begin, begin + region.length});
  }
  add(rows);
}

ByteSet ByteSet::without(const ByteSet& other) const {
  ByteSet left;
  auto next = other.ranges_.begin();
  for (ByteInterval range : ranges_) {
    while (next != other.ranges_.end() && next->end <= range.begin) ++next;
    for (auto cut = next; cut != other.ranges_.end() && cut->begin < range.end; ++cut) {
      if (cut->begin > range.begin) left.ranges_.push_back({range.begin, cut->begin});
      range.begin = std::max(range.begin, cut->end);
    }
    if (range.begin < range.end) left.ranges_.push_back(range);
  }
  return left;
}

std::int64_t ByteSet::num_bytes() const noexcept {
  std::int64_t sum = 0;
  for (const ByteInterval& range : ranges_) sum += range.end - range.begin;
  return sum;
}

ByteInterval ByteSet::hull() const noexcept {
  if (ranges_.empty()) return {0, 0};
  return {ranges_.front().begin, ranges_.back().end};
}

}  // namespace stepgraph::offload
