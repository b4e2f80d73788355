#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

// Reading files by position and writing them atomically: internal to this library.
namespace stepgraph {

// A regular file, open for reading. Bytes are copied, not mapped: a file that shrinks while it is open is an error, not
// a crash. Thread-safe for concurrent reads.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);  // throws Error(config) if it is not a regular file
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  ~InputFile();

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::string name() const { return path_.string(); }  // subject of messages
  [[nodiscard]] std::int64_t num_bytes() const noexcept { return num_bytes_; }

  // Fills all of `out`, or throws.
  void read(std::int64_t first_byte, std::span<std::byte> out) const;

 private:
  std::filesystem::path path_;
  int descriptor_         = -1;
  std::int64_t num_bytes_ = 0;
};

// The content of a text file. Throws Error(config) if it is longer than `most_bytes`.
[[nodiscard]] std::string read_text(const std::filesystem::path& path, std::int64_t most_bytes);

// Writes a file atomically: bytes go to a temporary file in the same folder, and keep() renames it. Throws
// Error(backend) with the system's message, for example for a full disk.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path);
  OutputFile(const OutputFile&)            = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();  // removes the temporary file unless keep() was called

  void write(std::span<const std::byte> bytes);
  void keep();

 private:
  [[noreturn]] void fail(std::string_view doing) const;

  std::filesystem::path path_;
  std::filesystem::path partial_;
  int descriptor_      = -1;
  std::int64_t so_far_ = 0;  // bytes
};

// Writes a text file atomically.
void write_text(const std::filesystem::path& path, std::string_view text);

}  // namespace stepgraph
