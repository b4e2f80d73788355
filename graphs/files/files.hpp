#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

// Files that are read by position and written whole: internal to this library.
namespace stepgraph {

// A regular file, open for reading. Bytes are copied out, never mapped: a file that shrinks while it is open is an
// error, not a crash. Threads may read at once.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);  // throws Error(config) for what is no regular file
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;
  ~InputFile();

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::string name() const { return path_.string(); }  // subject of messages
  [[nodiscard]] std::int64_t num_bytes() const noexcept { return num_bytes_; }

  // Fills `out`, or throws.
  void read(std::int64_t first_byte, std::span<std::byte> out) const;

 private:
  std::filesystem::path path_;
  int descriptor_         = -1;
  std::int64_t num_bytes_ = 0;
};

// All of a text file, which has no business to be longer than `most_bytes`.
[[nodiscard]] std::string read_text(const std::filesystem::path& path, std::int64_t most_bytes);

// A file that appears under its name when it is complete, or not at all: bytes go to a neighbour in the same folder,
// and keep() renames it. Throws Error(backend) with what the system says, as for a full disk.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path);
  OutputFile(const OutputFile&)            = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();  // what was not kept is removed

  void write(std::span<const std::byte> bytes);
  void keep();

 private:
  [[noreturn]] void fail(std::string_view doing) const;

  std::filesystem::path path_;
  std::filesystem::path partial_;
  int descriptor_      = -1;
  std::int64_t so_far_ = 0;  // bytes
};

// A whole text file, as OutputFile writes it.
void write_text(const std::filesystem::path& path, std::string_view text);

}  // namespace stepgraph
