#pragma once
#include <cstdint>
#include <vector>

#include "engine/graph/access.hpp"

// Sets of bytes of one buffer. Internal to graphs/step/offload.
namespace stepgraph::offload {

// Ranges that do not touch, in ascending order.
class ByteSet {
 public:
  ByteSet() = default;
  explicit ByteSet(ByteInterval range) { add(range); }

  void add(ByteInterval range);
  void add(const ByteSet& other);
  void add(const Region& region);
  [[nodiscard]] ByteSet without(const ByteSet& other) const;

  [[nodiscard]] const std::vector<ByteInterval>& ranges() const noexcept { return ranges_; }
  [[nodiscard]] bool empty() const noexcept { return ranges_.empty(); }
  [[nodiscard]] std::int64_t num_bytes() const noexcept;
  // From the first byte to the last; of an empty set: [0, 0).
  [[nodiscard]] ByteInterval hull() const noexcept;

 private:
  // A range that begins behind all others, or touches the last one.
  void append(ByteInterval range);

  std::vector<ByteInterval> ranges_;
};

[[nodiscard]] inline std::int64_t rounded_up(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace stepgraph::offload
