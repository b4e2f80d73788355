#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "engine/base/error.hpp"

// Reading files by position: internal to this library. engine/base/output_file.hpp writes files.
namespace stepgraph {

// Bytes at an aligned address. Grows, and keeps its memory.
class AlignedBytes {
 public:
  static constexpr std::int64_t alignment = 4096;
  [[nodiscard]] std::span<std::byte> first(std::int64_t size);  // not initialised

 private:
  struct Free {
    void operator()(std::byte* bytes) const noexcept { std::free(bytes); }
  };
  std::unique_ptr<std::byte, Free> bytes_;
  std::int64_t size_ = 0;
};

// The system could not open or read a file.
class FileError : public Error {
 public:
  FileError(ErrorKind kind, const std::string& message, int number) : Error(kind, message), number_(number) {}
  [[nodiscard]] int number() const noexcept { return number_; }  // errno

 private:
  int number_;
};

// A regular file, open for reading. Bytes are copied, not mapped: a file that shrinks while it is open is an error, not
// a crash. Thread-safe for concurrent reads.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);  // throws Error(config) if it is not a regular file, or FileError
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  ~InputFile();

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::string name() const { return path_.string(); }  // subject of messages
  [[nodiscard]] std::int64_t num_bytes() const noexcept { return num_bytes_; }

  // Fills all of `out`, or throws.
  void read(std::int64_t first_byte, std::span<std::byte> out) const;
  // Reads past the page cache where the file system can do it: for large files that are read once. The bytes lie in
  // `room`, which is reused. It is aligned so that an element whose place in the file is a multiple of its size can be
  // used in place.
  [[nodiscard]] std::span<const std::byte> read_direct(std::int64_t first_byte, std::int64_t size,
                                                       AlignedBytes& room) const;

 private:
  std::filesystem::path path_;
  int descriptor_         = -1;
  std::int64_t num_bytes_ = 0;
};

// The content of a text file. Throws Error(config) if it is longer than `most_bytes`.
[[nodiscard]] std::string read_text(const std::filesystem::path& path, std::int64_t most_bytes);

}  // namespace stepgraph
