#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "engine/run/storage.hpp"

namespace stepgraph {

struct SpillOptions {
  bool io_uring              = true;  // where the build and the kernel have it; else threads with pread and pwrite
  bool direct                = true;  // past the page cache (O_DIRECT), where the file system allows it
  std::int64_t request_bytes = std::int64_t{1} << 20;  // a transfer is cut into requests of this size,
  int depth                  = 16;                     // so many of which are in flight at one time
  int threads                = 4;                      // without io_uring: how many transfer at one time
};

// The buffers of a rank in a file that no other process can open. It has no name, so nothing is left of it when the
// process ends, even if it is killed. Its bytes are reserved when it is made: a full disk is an error then.
class SpillFile final : public Storage {
 public:
  // Throws Error(backend): the folder is missing or cannot be written, or the disk is full. A limit of file sizes is an
  // error too in a program that ignores SIGXFSZ; others are ended by it.
  SpillFile(std::string folder, Rank rank, std::int64_t size_bytes, const SpillOptions& options = {});
  SpillFile(const SpillFile&)            = delete;
  SpillFile& operator=(const SpillFile&) = delete;
  ~SpillFile() override;

  [[nodiscard]] std::int64_t size_bytes() const noexcept override;
  void read(std::int64_t offset, std::span<std::byte> to) override;
  void write(std::int64_t offset, std::span<const std::byte> from) override;

  [[nodiscard]] bool uses_io_uring() const noexcept;
  [[nodiscard]] bool is_direct() const noexcept;  // whole blocks bypass the page cache

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// For RunOptions::storage: one SpillFile in the folder for each rank. Throws Error(config) for options out of range.
[[nodiscard]] MakeStorage spill_files(std::string folder, SpillOptions options = {});

}  // namespace stepgraph
