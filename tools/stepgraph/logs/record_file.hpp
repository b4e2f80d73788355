#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/base/partial.hpp"

namespace stepgraph::cli {

// A file to which a run appends one record after another, for days. After a write that fails, as on a full disk, the
// part that was written is cut off again: the file ends with a whole record, and the next one can be tried. Records of
// a process that is killed are in the file up to the last one that add() has returned from; its last line may be cut.
// One thread.
class RecordFile {
 public:
  explicit RecordFile(const std::string& path);  // made if it is missing. Throws Error(backend)
  void add(std::string_view record);             // throws Error(backend) with the system's reason

 private:
  std::string path_;
  Descriptor file_;
  std::int64_t size_ = 0;  // bytes of whole records
};

}  // namespace stepgraph::cli
