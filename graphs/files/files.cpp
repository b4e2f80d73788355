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
    if (error == ENOENT) throw FileError(ErrorKind::config, str(name(), ": there is no such file"), error);
    throw FileError(ErrorKind::config, str(name(), ": cannot be opened: ", system_reason(error)), error);
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
    if (got < 0) {
      const int error = errno;
      throw FileError(ErrorKind::backend, str(name(), ": cannot be read: ", system_reason(error)), error);
    }
    if (got == 0)
      throw Error(ErrorKind::config, str(name(), ": ends at byte ", first_byte, ", but ", out.size(),
                                         " more are needed (it had ", num_bytes_, " bytes when it was opened)"));
    out = out.subspan(static_cast<std::size_t>(got));
    first_byte += got;
  }
}

std::span<std::byte> AlignedBytes::first(std::int64_t size) {
  if (size > size_) {
    const std::int64_t whole = (size + alignment - 1) / alignment * alignment;
    bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, static_cast<std::size_t>(whole))));
    if (!bytes_) throw Error(ErrorKind::backend, str("file: there is no memory for ", whole, " bytes"));
    size_ = whole;
  }
  return {bytes_.get(), static_cast<std::size_t>(size)};
}

std::span<const std::byte> InputFile::read_direct(std::int64_t first_byte, std::int64_t size,
                                                  AlignedBytes& room) const {
  const auto down          = [](std::int64_t at) { return at / AlignedBytes::alignment * AlignedBytes::alignment; };
  const std::int64_t begin = down(first_byte), end = down(first_byte + size + AlignedBytes::alignment - 1);
  const std::span<std::byte> all = room.first(end - begin);
  const std::span<std::byte> wanted =
      all.subspan(static_cast<std::size_t>(first_byte - begin), static_cast<std::size_t>(size));
  // Another open file of the same one: /proc names it even if its folder is gone.
  const Descriptor direct(
      ::open(("/proc/self/fd/" + std::to_string(descriptor_)).c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
  std::int64_t done = 0;
  while (direct.is_open() && begin + done < first_byte + size) {
    const ssize_t got =
        ::pread(direct.get(), all.data() + done, all.size() - static_cast<std::size_t>(done), begin + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0 || (got % AlignedBytes::alignment != 0 && begin + done + got < first_byte + size)) break;
    done += got;
  }
  if (begin + done < first_byte + size) read(first_byte, wanted);  // which also explains what is wrong
  return wanted;
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
