#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

// Reading files by position: internal to this library. engine/base/output_file.hpp writes files.
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

}  // namespace stepgraph
