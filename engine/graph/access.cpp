#include "engine/graph/access.hpp"

#include <algorithm>

#include "engine/base/error.hpp"

namespace stepgraph {

Access Buffer::range(std::int64_t offset_bytes, std::int64_t length_bytes) const {
  return {*this, {.offset = offset_bytes, .length = length_bytes}};
}

Access Buffer::strided(std::int64_t offset_bytes, std::int64_t length_bytes, std::int64_t stride_bytes,
                       std::int64_t count) const {
  return {*this, {.offset = offset_bytes, .length = length_bytes, .stride = stride_bytes, .count = count}};
}

Access Access::range(std::int64_t offset_bytes, std::int64_t length_bytes) const {
  if (region.length == whole) return buffer.range(offset_bytes, length_bytes);
  if (!region.contiguous()) {
    throw Error(ErrorKind::config, str("access: ", length_bytes, " bytes from ", offset_bytes, " of ",
                                       to_string(region), ", which is strided (Buffer::strided names rows of it)"));
  }
  if (offset_bytes < 0 || length_bytes < 0 || offset_bytes > region.length ||
      length_bytes > region.length - offset_bytes) {
    throw Error(ErrorKind::config, str("access: ", length_bytes, " bytes from ", offset_bytes, " of ",
                                       to_string(region), ", which has ", region.length));
  }
  return buffer.range(region.offset + offset_bytes, length_bytes);
}

std::string to_string(const Region& region) {
  std::int64_t end = 0;  // may overflow for a region that is invalid
  if (__builtin_add_overflow(region.offset, region.length, &end)) end = std::numeric_limits<std::int64_t>::max();
  const std::string first = str("[", region.offset, ", ", end, ")");
  return region.contiguous() ? first : str(region.count, " x ", first, " every ", region.stride);
}

std::string_view to_string(AccessMode mode) noexcept {
  constexpr std::array<std::string_view, 3> names{"read", "write", "accumulate"};
  return names[static_cast<std::size_t>(mode)];
}

AccessList::AccessList(std::initializer_list<Access> accesses) {
  for (const Access& access : accesses) push_back(access);
}

AccessList::AccessList(const std::vector<Access>& accesses) {
  for (const Access& access : accesses) push_back(access);
}

AccessList::AccessList(const std::vector<Buffer>& buffers) {
  for (const Buffer buffer : buffers) push_back(buffer);
}

void AccessList::push_back(const Access& access) {
  if (size_ < inline_capacity) {
    inline_[size_] = access;
  } else {
    if (heap_.empty()) heap_.assign(inline_.begin(), inline_.end());
    heap_.push_back(access);
  }
  ++size_;
}

std::span<const Access> AccessList::view() const noexcept {
  return heap_.empty() ? std::span(inline_.data(), std::min(size_, inline_capacity)) : std::span(heap_);
}

namespace {

// The first range that `b` shares with bytes [begin, end).
std::optional<ByteInterval> overlap(std::int64_t begin, std::int64_t end, const Region& b) {
  if (b.contiguous()) {
    if (begin >= b.end() || b.begin() >= end) return std::nullopt;
    return ByteInterval{std::max(begin, b.begin()), std::min(end, b.end())};
  }
  // The first row that ends after `begin`.
  const std::int64_t past = begin - (b.offset + b.length);
  const std::int64_t row  = past < 0 ? 0 : past / b.stride + 1;
  if (row >= b.count) return std::nullopt;
  const std::int64_t row_begin = b.offset + row * b.stride;
  if (row_begin >= end) return std::nullopt;
  return ByteInterval{std::max(begin, row_begin), std::min(end, row_begin + b.length)};
}

}  // namespace

std::optional<ByteInterval> overlap(const Region& a, const Region& b) {
  if (a.begin() >= b.end() || b.begin() >= a.end()) return std::nullopt;
  if (a.contiguous()) return overlap(a.begin(), a.end(), b);
  if (b.contiguous()) return overlap(b.begin(), b.end(), a);
  if (a.stride == b.stride) {
    // Rows repeat with the same period, so only the column distance and the common rows matter.
    const Region &low = a.offset <= b.offset ? a : b, &high = a.offset <= b.offset ? b : a;
    const std::int64_t distance = high.offset - low.offset;
    const std::int64_t rows = distance / low.stride, columns = distance % low.stride;
    if (columns < low.length && rows < low.count) {
      return ByteInterval{high.offset, high.offset + std::min(high.length, low.length - columns)};
    }
    // A row of `high` may extend into the next row of `low`.
    if (columns + high.length > low.stride && rows + 1 < low.count) {
      const std::int64_t begin = low.offset + (rows + 1) * low.stride;
      return ByteInterval{begin, std::min(begin + low.length, high.offset + high.length)};
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

}  // namespace stepgraph
