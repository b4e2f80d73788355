#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace stepgraph {

// A new file that is written from its begin to its end, past the page cache (O_DIRECT): large files of a run neither
// push out other cached data nor wait for it. Two threads write full buffers while append() fills the next one, so the
// disk always has a write to do. Where the file system has no such writes they are ordinary ones. One thread at a time.
//
// Throws Error(backend) with the system's reason: an error of a writing thread is thrown by a later append() or by
// finish(). A file that was not finished stays as it is.
class DirectFile {
 public:
  // The name must be free. `expected_bytes`: room for so many is reserved where the file system can do it, so that a
  // full disk is an error before anything is written.
  explicit DirectFile(std::string path, std::int64_t expected_bytes = 0);
  DirectFile(const DirectFile&)            = delete;
  DirectFile& operator=(const DirectFile&) = delete;
  ~DirectFile();

  void append(std::span<const std::byte> bytes);
  // The same without a copy: the caller fills the first `size` bytes of room(), which is never empty, and tells so.
  [[nodiscard]] std::span<std::byte> room() noexcept;
  void filled(std::size_t size);
  void finish();  // returns when all bytes are on the disk, and closes the file

  [[nodiscard]] bool is_direct() const noexcept;
  [[nodiscard]] std::int64_t num_bytes() const noexcept;  // appended so far

  static constexpr std::size_t buffer_bytes = std::size_t{4} << 20;
  static constexpr std::size_t alignment    = 4096;  // of positions and sizes of direct writes

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepgraph
