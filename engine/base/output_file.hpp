#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>

#include "engine/base/partial.hpp"

namespace stepgraph {

// A file that appears under its name when it is complete, or not at all. The bytes go to a temporary file in the same
// folder, which has no name until keep(): a killed process leaves nothing. Where the file system has no such files it
// is PATH.partial-RANDOM. That name cannot be predicted, and it is opened exclusively: a link that another user put
// there is not followed. The next OutputFile of the same name removes the temporary file of a killed process. If `path`
// is a link, the target of the link is replaced. The new file gets the owner and mode of the file that it replaces. A
// pipe or a device is written in place.
//
// Throws Error(config) where `path` is a folder, and Error(backend) with the system's reason, such as a full disk.
class OutputFile {
 public:
  enum class Temporary { unnamed, named };
  // Temporary::named: as where the file system has no files without a name.
  explicit OutputFile(const std::string& path, Temporary temporary = Temporary::unnamed);
  OutputFile(const OutputFile&)            = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();  // removes the temporary file unless keep() was called

  void write(std::span<const std::byte> bytes);
  void keep();

  [[nodiscard]] int descriptor() const noexcept {
    return descriptor_.get();
  }  // for another program that writes the file

 private:
  [[noreturn]] void fail(std::string_view doing) const;

  std::string name_;       // as given, for messages
  std::string path_;       // without links; empty: written in place
  std::string temporary_;  // empty: it has no name, or is written in place
  Descriptor descriptor_;
  std::int64_t so_far_ = 0;  // bytes
};

// Whether OutputFile would write it in place: a pipe, a character device, or an open file's name such as /dev/stdout.
[[nodiscard]] bool is_written_in_place(const std::string& path);

// Writes a file completely or not at all.
void write_text(const std::string& path, std::string_view text);

// The same for a stream of text: `write` fills it.
void write_stream(const std::string& path, const std::function<void(std::ostream&)>& write);

}  // namespace stepgraph
