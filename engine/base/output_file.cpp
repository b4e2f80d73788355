#include "engine/base/output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <streambuf>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;

// The most bytes of one system call, which may transfer fewer.
constexpr std::size_t most_at_once = std::size_t{1} << 30;

std::string without_links(const std::string& path) {
  std::error_code error;
  const fs::path target = fs::weakly_canonical(path, error);
  return error ? path : target.string();
}

// Passes text on to a file in blocks. An error of the file reaches the caller through the stream's exceptions.
class FileBuffer final : public std::streambuf {
 public:
  explicit FileBuffer(OutputFile& file) : file_(file), block_(std::size_t{1} << 16) {
    setp(block_.data(), block_.data() + block_.size());
  }

 private:
  int_type overflow(int_type next) override {
    sync();
    if (!traits_type::eq_int_type(next, traits_type::eof())) sputc(traits_type::to_char_type(next));
    return traits_type::not_eof(next);
  }
  int sync() override {
    file_.write(std::as_bytes(std::span(pbase(), pptr())));
    setp(block_.data(), block_.data() + block_.size());
    return 0;
  }

  OutputFile& file_;
  std::vector<char> block_;
};

}  // namespace

OutputFile::OutputFile(const std::string& path) : name_(path), path_(without_links(path)) {
  // A rename would replace a pipe or device by a file.
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw Error(ErrorKind::config, str(name_, S_ISDIR(status.st_mode) ? ": is a folder" : ": is not a regular file",
                                       " (a file, or a new name)"));
  }
  // O_EXCL: two writers of the same file must not share a temporary file, and a link planted there is not followed.
  for (int number = 0; number < 1000; ++number) {
    temporary_  = str(path_, ".", ::getpid(), "-", number, ".partial");
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) return;
    if (errno != EEXIST) break;
  }
  fail("cannot be created");
}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void OutputFile::fail(std::string_view doing) const {
  const std::string reason = std::generic_category().message(errno);
  throw Error(ErrorKind::backend,
              str(name_, ": ", doing, ": ", reason, so_far_ == 0 ? "" : str(" (after ", so_far_, " bytes)")));
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = ::write(descriptor_, bytes.data(), std::min(bytes.size(), most_at_once));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("cannot be written");
    bytes = bytes.subspan(static_cast<std::size_t>(done));
    so_far_ += done;
  }
}

void OutputFile::keep() {
  // Some file systems report a full disk only now.
  if (::fsync(descriptor_) != 0) fail("cannot be written");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be renamed");
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("cannot be closed");
}

void write_text(const std::string& path, std::string_view text) {
  OutputFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.keep();
}

void write_stream(OutputFile& file, const std::function<void(std::ostream&)>& write) {
  FileBuffer buffer(file);
  std::ostream out(&buffer);
  out.exceptions(std::ios::badbit);  // rethrows what the buffer throws
  write(out);
  out.flush();
}

void write_stream(const std::string& path, const std::function<void(std::ostream&)>& write) {
  std::error_code ignored;
  if (const fs::file_status status = fs::status(path, ignored); fs::exists(status) && !fs::is_regular_file(status)) {
    std::ofstream out(path, std::ios::binary);
    if (out) write(out);
    out.flush();
    const int reason = errno;
    if (!out)
      throw Error(ErrorKind::backend, str(path, ": cannot be written: ", std::generic_category().message(reason)));
    return;
  }
  OutputFile file(path);
  write_stream(file, write);
  file.keep();
}

}  // namespace stepgraph
