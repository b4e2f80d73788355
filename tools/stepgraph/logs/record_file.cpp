#include "tools/stepgraph/logs/record_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "engine/base/error.hpp"

namespace stepgraph::cli {

RecordFile::RecordFile(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666)) {
  if (!file_.is_open()) throw Error(ErrorKind::backend, str(path, ": cannot be opened: ", system_reason(errno)));
  size_ = ::lseek(file_.get(), 0, SEEK_END);  // -1: a pipe
}

void RecordFile::add(std::string_view record) {
  std::string_view rest = record;
  while (!rest.empty()) {
    const ssize_t written = ::write(file_.get(), rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const std::string reason = written < 0 ? system_reason(errno) : "nothing was written";
      if (size_ >= 0) static_cast<void>(!::ftruncate(file_.get(), size_));
      throw Error(ErrorKind::backend, str(path_, ": cannot be written: ", reason));
    }
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
  if (size_ >= 0) size_ += static_cast<std::int64_t>(record.size());
}

}  // namespace stepgraph::cli
