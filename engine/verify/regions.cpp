#include "engine/verify/regions.hpp"

#include <algorithm>

namespace stepgraph::verifier {
namespace {

// The first range that `b` shares with bytes [begin, end).
std::optional<Range> overlap(std::int64_t begin, std::int64_t end, const Region& b) {
  if (b.contiguous()) {
    if (begin >= b.end() || b.begin() >= end) return std::nullopt;
    return Range{std::max(begin, b.begin()), std::min(end, b.end())};
  }
  // The first row that ends after `begin`.
  const std::int64_t past = begin - (b.offset + b.length);
  const std::int64_t row  = past < 0 ? 0 : past / b.stride + 1;
  if (row >= b.count) return std::nullopt;
  const std::int64_t row_begin = b.offset + row * b.stride;
  if (row_begin >= end) return std::nullopt;
  return Range{std::max(begin, row_begin), std::min(end, row_begin + b.length)};
}

}  // namespace

std::optional<Range> overlap(const Region& a, const Region& b) {
  if (a.begin() >= b.end() || b.begin() >= a.end()) return std::nullopt;
  if (a.contiguous()) return overlap(a.begin(), a.end(), b);
  if (b.contiguous()) return overlap(b.begin(), b.end(), a);
  if (a.stride == b.stride) {
    // Rows repeat with the same period, so only the column distance and the common rows matter.
    const Region &low = a.offset <= b.offset ? a : b, &high = a.offset <= b.offset ? b : a;
    const std::int64_t distance = high.offset - low.offset;
    const std::int64_t rows = distance / low.stride, columns = distance % low.stride;
    if (columns < low.length && rows < low.count) {
      return Range{high.offset, high.offset + std::min(high.length, low.length - columns)};
    }
    // A row of `high` may extend into the next row of `low`.
    if (columns + high.length > low.stride && rows + 1 < low.count) {
      const std::int64_t begin = low.offset + (rows + 1) * low.stride;
      return Range{begin, std::min(begin + low.length, high.offset + high.length)};
    }
    return std::nullopt;
  }
  const Region &fewer = a.count <= b.count ? a : b, &more = a.count <= b.count ? b : a;
  for (std::int64_t row = 0; row < fewer.count; ++row) {
    const std::int64_t begin = fewer.offset + row * fewer.stride;
    if (const auto shared = overlap(begin, begin + fewer.length, more)) return shared;
  }
  return std::nullopt;
}

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
