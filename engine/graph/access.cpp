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

}  // namespace stepgraph
