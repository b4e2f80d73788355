#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/base/types.hpp"

namespace stepgraph {

struct Access;

// A handle to logical memory of one rank. The graph that made it knows its size, type, space and lifetime.
struct Buffer {
  std::uint32_t id = ~std::uint32_t{0};  // of no graph
  [[nodiscard]] Access range(std::int64_t offset_bytes, std::int64_t length_bytes) const;
  // `count` ranges of `length_bytes`, the first at `offset_bytes`, each `stride_bytes` after the one before.
  [[nodiscard]] Access strided(std::int64_t offset_bytes, std::int64_t length_bytes, std::int64_t stride_bytes,
                               std::int64_t count) const;
  friend bool operator==(const Buffer&, const Buffer&) = default;
};

// A set of bytes inside one buffer. A graph stores it in normal form: either one range (stride 0, count 1), or count >
// 1 ranges with 0 < length < stride.
struct Region {
  std::int64_t offset = 0;
  std::int64_t length = 0;
  std::int64_t stride = 0;
  std::int64_t count  = 1;

  [[nodiscard]] std::int64_t begin() const noexcept { return offset; }
  [[nodiscard]] std::int64_t end() const noexcept { return offset + stride * (count - 1) + length; }
  [[nodiscard]] std::int64_t num_bytes() const noexcept { return length * count; }
  [[nodiscard]] bool contiguous() const noexcept { return count == 1; }
  friend bool operator==(const Region&, const Region&) = default;
};
[[nodiscard]] std::string to_string(const Region& region);  // "[0, 64)" or "16 x [0, 64) every 256"

// Bytes [begin, end).
struct ByteInterval {
  std::int64_t begin, end;
};
// The first bytes that both regions have. They are in normal form and not empty.
[[nodiscard]] std::optional<ByteInterval> overlap(const Region& a, const Region& b);

enum class AccessMode : std::uint8_t { read, write, accumulate };  // accumulate: a read and a write
[[nodiscard]] std::string_view to_string(AccessMode mode) noexcept;
[[nodiscard]] constexpr bool reads(AccessMode mode) noexcept { return mode != AccessMode::write; }
[[nodiscard]] constexpr bool writes(AccessMode mode) noexcept { return mode != AccessMode::read; }

// A buffer and the bytes of it that a node uses. A plain Buffer stands for all of its bytes.
struct Access {
  static constexpr std::int64_t whole = std::numeric_limits<std::int64_t>::min();

  Buffer buffer;
  Region region{.length = whole};

  Access() = default;
  Access(Buffer whole_buffer) : buffer(whole_buffer) {}  // NOLINT: implicit on purpose
  Access(Buffer of, Region bytes) : buffer(of), region(bytes) {}

  // Bytes [offset, offset + length) of an access that is a single range. Throws Error(config) for a strided one, and
  // for bytes outside the range.
  [[nodiscard]] Access range(std::int64_t offset_bytes, std::int64_t length_bytes) const;
};

// The accesses of one declaration; up to four of them need no heap memory.
class AccessList {
 public:
  AccessList() = default;
  AccessList(const Access& access) { push_back(access); }  // NOLINT: implicit on purpose, as are the others
  AccessList(Buffer whole_buffer) : AccessList(Access(whole_buffer)) {}  // NOLINT
  AccessList(std::initializer_list<Access> accesses);
  AccessList(const std::vector<Access>& accesses);
  AccessList(const std::vector<Buffer>& buffers);

  void push_back(const Access& access);
  [[nodiscard]] std::span<const Access> view() const noexcept;
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }

 private:
  static constexpr std::size_t inline_capacity = 4;
  std::size_t size_                            = 0;
  std::array<Access, inline_capacity> inline_;
  std::vector<Access> heap_;  // all of them, once there are more than fit inline
};

}  // namespace stepgraph
