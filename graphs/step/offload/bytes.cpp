#include "graphs/step/offload/bytes.hpp"

#include <algorithm>

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

void ByteSet::add(const ByteSet& other) {
  for (const ByteInterval& range : other.ranges_) add(range);
}

void ByteSet::add(const Region& region) {
  constexpr std::int64_t most_rows = 4096;
  if (region.num_bytes() == 0) return;
  if (region.count > most_rows) return add(ByteInterval{region.begin(), region.end()});
  for (std::int64_t row = 0; row < region.count; ++row) {
    const std::int64_t begin = region.offset + row * region.stride;
    add(ByteInterval{begin, begin + region.length});
  }
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
