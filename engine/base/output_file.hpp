#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>

namespace stepgraph {

// A file that appears under its name when it is complete, or not at all. The bytes go to a temporary file in the same
// folder, which keep() renames. If `path` is a link, the target of the link is replaced. Throws Error(config) where
// `path` is a folder, a pipe or a device, and Error(backend) with the system's reason, such as a full disk.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  OutputFile(const OutputFile&)            = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();  // removes the temporary file unless keep() was called

  void write(std::span<const std::byte> bytes);
  void keep();

  // The name of the temporary file, for another program that writes it.
  [[nodiscard]] const std::string& temporary() const noexcept { return temporary_; }

 private:
  [[noreturn]] void fail(std::string_view doing) const;

  std::string name_;  // as given, for messages
  std::string path_;  // without links
  std::string temporary_;
  int descriptor_      = -1;
  std::int64_t so_far_ = 0;  // bytes
};

// Writes a file completely or not at all.
void write_text(const std::string& path, std::string_view text);

// The same for a stream of text: `write` fills it. A pipe or a device, such as /dev/stdout, is written directly.
void write_stream(const std::string& path, const std::function<void(std::ostream&)>& write);
// Fills an open file, without keep().
void write_stream(OutputFile& file, const std::function<void(std::ostream&)>& write);

}  // namespace stepgraph
