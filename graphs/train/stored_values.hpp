#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "engine/run/memory.hpp"
#include "graphs/step/step_graph.hpp"

namespace stepgraph {

// Reads and writes elements of buffers on a device, in host memory, on disk, and compressed, in the type that the step
// computes with. Between runs of the step; any thread. Elements of compressed buffers are kept decompressed until
// flush(), up to a limit, so that pieces of one buffer can be read or written one after another.
class StoredValues {
 public:
  // The memory must outlive this object.
  StoredValues(const StepGraph& step, const Memory& memory);

  template <class T>
  void read(Buffer buffer, std::span<T> to, std::int64_t offset = 0) const {
    read_bytes(buffer, offset * static_cast<std::int64_t>(sizeof(T)), std::as_writable_bytes(to));
  }
  template <class T>
  void write(Buffer buffer, std::span<const T> from, std::int64_t offset = 0) {
    write_bytes(buffer, offset * static_cast<std::int64_t>(sizeof(T)), std::as_bytes(from));
  }
  void read_bytes(Buffer buffer, std::int64_t offset, std::span<std::byte> to) const;
  void write_bytes(Buffer buffer, std::int64_t offset, std::span<const std::byte> from);

  // The bytes of a buffer that the host can access and whose elements are as the step computes with them: to be written
  // in place, between runs. Empty: of other buffers.
  [[nodiscard]] std::span<std::byte> in_place(Buffer buffer) const;

  // One long range is read faster than many rows: on a device, and on disk.
  [[nodiscard]] bool prefers_long_ranges(Buffer buffer) const;

  // Compresses what was written. To be called before the step runs, and forgets what was read.
  void flush();

 private:
  struct Raw {
    std::vector<std::byte> bytes;
    bool changed = false;
  };
  [[nodiscard]] const HomeFormat* packed(Buffer buffer) const;  // null: not compressed
  Raw& raw(const HomeFormat& home) const;
  void store(const HomeFormat& home, const Raw& of) const;

  Graph graph_;  // for spaces and names
  const Memory& memory_;
  std::map<std::uint32_t, HomeFormat> packed_;  // compressed homes, by buffer
  mutable std::mutex mutex_;
  mutable std::map<std::uint32_t, Raw> raw_;
  mutable std::size_t raw_bytes_ = 0;
};

}  // namespace stepgraph
