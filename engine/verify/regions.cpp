#include "engine/verify/regions.hpp"

#include <algorithm>

namespace stepgraph::verifier {
bool covers(const Region& outer, const Region& inner) {
  if (inner.begin() < outer.begin() || inner.end() > outer.end()) return false;
  if (outer.contiguous()) return true;
  const std::int64_t column = (inner.offset - outer.offset) % outer.stride;
  return column + inner.length <= outer.length && (inner.contiguous() || inner.stride % outer.stride == 0);
}

void WrittenBytes::insert(std::int64_t begin, std::int64_t end) {
  auto next = ranges_.upper_bound(begin);
  if (next != ranges_.begin() && std::prev(next)->second >= begin) {
    --next;
    begin = next->first;
  }
  while (next != ranges_.end() && next->first <= end) {
    end  = std::max(end, next->second);
    next = ranges_.erase(next);
  }
  ranges_.emplace_hint(next, begin, end);
}

void WrittenBytes::add(const Region& region) {
  if (region.contiguous()) return insert(region.begin(), region.end());
  const auto covers_it = [&](const Region& other) { return covers(other, region); };
  if (std::any_of(known_.begin(), known_.end(), covers_it)) return;
  strided_.push_back(region);
  known_.push_back(region);
}

std::optional<Range> WrittenBytes::missing(std::int64_t begin, std::int64_t end) const {
  auto next = ranges_.upper_bound(begin);
  if (next != ranges_.begin() && std::prev(next)->second > begin) begin = std::prev(next)->second;
  if (begin >= end) return std::nullopt;
  return Range{begin, next == ranges_.end() ? end : std::min(end, next->first)};
}

std::optional<Range> WrittenBytes::first_missing(const Region& region) {
  const auto covers_it = [&](const Region& other) { return covers(other, region); };
  if (std::any_of(known_.begin(), known_.end(), covers_it)) return std::nullopt;
  const auto look = [&]() -> std::optional<Range> {
    for (std::int64_t row = 0; row < region.count; ++row) {
      const std::int64_t begin = region.offset + row * region.stride;
      if (const auto gap = missing(begin, begin + region.length)) return gap;
    }
    return std::nullopt;
  };
  auto gap = look();
  if (gap && !strided_.empty()) {
    for (const Region& written : strided_) {
      for (std::int64_t row = 0; row < written.count; ++row) {
        insert(written.offset + row * written.stride, written.offset + row * written.stride + written.length);
      }
    }
    strided_.clear();
    gap = look();
  }
  if (!gap && !region.contiguous()) known_.push_back(region);
  return gap;
}

}  // namespace stepgraph::verifier
