#pragma once
#include <cstdint>

namespace stepgraph {

// Indices [begin, end): of the elements of a weight, or of one dim of a tensor.
struct IndexRange {
  std::int64_t begin                                           = 0;
  std::int64_t end                                             = 0;
  friend bool operator==(const IndexRange&, const IndexRange&) = default;

  [[nodiscard]] std::int64_t size() const noexcept { return end - begin; }
  [[nodiscard]] bool contains(std::int64_t index) const noexcept { return begin <= index && index < end; }
};

}  // namespace stepgraph
