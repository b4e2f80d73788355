#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/peers.hpp"

// Values as bytes, for Peers: all processes are the same program on machines of one kind.
namespace stepgraph {

class Packer {
 public:
  template <class T>
  requires std::is_trivially_copyable_v<T> Packer& add(const T& value) {
    return raw(std::as_bytes(std::span(&value, 1)));
  }
  template <class T>
  requires std::is_trivially_copyable_v<T> Packer& add_list(std::span<const T> values) {
    add(static_cast<std::uint64_t>(values.size()));
    return raw(std::as_bytes(values));
  }
  Packer& add_text(std::string_view text) { return add_list(std::span<const char>(text)); }
  [[nodiscard]] Bytes take() { return std::move(bytes_); }

 private:
  Packer& raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Bytes bytes_;
};

// Reads values in the order in which they were added. Throws Error(backend) where there are too few bytes. The bytes
// must outlive it.
class Unpacker {
 public:
  explicit Unpacker(std::span<const std::byte> bytes) : rest_(bytes) {}

  [[nodiscard]] bool empty() const noexcept { return rest_.empty(); }
  template <class T>
  requires std::is_trivially_copyable_v<T>
  [[nodiscard]] T get() {
    T value;
    const std::span<const std::byte> bytes = raw(sizeof(T));
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  template <class T>
  requires std::is_trivially_copyable_v<T>
  [[nodiscard]] std::vector<T> get_list() {
    const auto size = get<std::uint64_t>();
    if (size > rest_.size() / sizeof(T)) throw Error(ErrorKind::backend, "packed values: the bytes end too early");
    std::vector<T> values(static_cast<std::size_t>(size));
    const std::span<const std::byte> bytes = raw(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  [[nodiscard]] std::string get_text() {
    const std::vector<char> text = get_list<char>();
    return {text.begin(), text.end()};
  }

 private:
  std::span<const std::byte> raw(std::size_t size) {
    if (size > rest_.size()) throw Error(ErrorKind::backend, "packed values: the bytes end too early");
    const std::span<const std::byte> taken = rest_.first(size);
    rest_                                  = rest_.subspan(size);
    return taken;
  }
  std::span<const std::byte> rest_;
};

}  // namespace stepgraph
