#include "graphs/files/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"

namespace stepgraph {
namespace {

// The most bytes of one system call, which may transfer fewer.
constexpr std::size_t most_at_once = std::size_t{1} << 30;

}  // namespace

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  if (path_.empty()) throw Error(ErrorKind::config, "file: the name is empty (a file name)");
  // O_NONBLOCK: opening a pipe would wait for a writer.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) {
    const int error = errno;
    if (error == ENOENT) throw Error(ErrorKind::config, str(name(), ": there is no such file"));
    throw Error(ErrorKind::config, str(name(), ": cannot be opened: ", system_reason(error)));
  }
  struct stat status {};
  std::string wrong;
  if (::fstat(descriptor_, &status) != 0) {
    wrong = str("the size cannot be read: ", system_reason(errno));
  } else if (S_ISDIR(status.st_mode)) {
    wrong = "is a folder (a file is needed)";
  } else if (!S_ISREG(status.st_mode)) {
    wrong = "is not a regular file";
  }
  if (!wrong.empty()) {
    ::close(descriptor_);
    throw Error(ErrorKind::config, str(name(), ": ", wrong));
  }
  num_bytes_ = status.st_size;
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      num_bytes_(std::exchange(other.num_bytes_, 0)) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void InputFile::read(std::int64_t first_byte, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(descriptor_, out.data(), std::min(out.size(), most_at_once), first_byte);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(ErrorKind::backend, str(name(), ": cannot be read: ", system_reason(errno)));
    if (got == 0)
      throw Error(ErrorKind::config, str(name(), ": ends at byte ", first_byte, ", but ", out.size(),
                                         " more are needed (it had ", num_bytes_, " bytes when it was opened)"));
    out = out.subspan(static_cast<std::size_t>(got));
    first_byte += got;
  }
}

std::string read_text(const std::filesystem::path& path, std::int64_t most_bytes) {
  const InputFile file(path);
  if (file.num_bytes() > most_bytes)
    throw Error(ErrorKind::config, str(file.name(), ": has ", file.num_bytes(), " bytes (at most ", most_bytes, ")"));
  std::string text(static_cast<std::size_t>(file.num_bytes()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace stepgraph
