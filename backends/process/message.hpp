#pragma once
#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "engine/base/error.hpp"
#include "engine/run/peers.hpp"

// The fields of a message, one after another: numbers with their low byte first, texts behind their length.
namespace stepgraph {

class MessageWriter {
 public:
  template <std::integral T>
  MessageWriter& number(T value) {
    auto rest = static_cast<std::uint64_t>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i, rest >>= 8) bytes_.push_back(static_cast<std::byte>(rest));
    return *this;
  }
  MessageWriter& raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  MessageWriter& text(std::string_view text) {
    number(static_cast<std::uint32_t>(text.size()));
    return raw(std::as_bytes(std::span(text)));
  }
  [[nodiscard]] const Bytes& bytes() const noexcept { return bytes_; }

 private:
  Bytes bytes_;
};

// Throws Error(backend) where a message is shorter than its fields. The bytes must outlive the reader.
class MessageReader {
 public:
  explicit MessageReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <std::integral T>
  [[nodiscard]] T number() {
    const std::span<const std::byte> bytes = take(sizeof(T));
    std::uint64_t value                    = 0;
    for (std::size_t i = sizeof(T); i-- > 0;) value = value << 8 | static_cast<std::uint64_t>(bytes[i]);
    return static_cast<T>(value);
  }
  [[nodiscard]] std::span<const std::byte> take(std::size_t size) {
    if (size > rest_.size()) throw Error(ErrorKind::backend, "message: ends too early");
    const std::span<const std::byte> taken = rest_.first(size);
    rest_                                  = rest_.subspan(size);
    return taken;
  }
  [[nodiscard]] std::string text() {
    const std::span<const std::byte> bytes = take(number<std::uint32_t>());
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  [[nodiscard]] std::span<const std::byte> rest() { return take(rest_.size()); }

 private:
  std::span<const std::byte> rest_;
};

}  // namespace stepgraph
