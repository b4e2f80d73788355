#include "engine/base/output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <ostream>
#include <streambuf>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"
#include "engine/base/words.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;

// The most bytes of one system call, which may transfer fewer.
constexpr std::size_t most_at_once = std::size_t{1} << 30;

std::string without_links(const std::string& path) {
  constexpr int most_links = 40;  // as in Linux
  std::error_code error;
  fs::path end = path;  // of a chain of links, the last of which may lead to a file that does not exist yet
  for (int i = 0; i < most_links && fs::is_symlink(fs::symlink_status(end, error)); ++i)
    end = end.parent_path() / fs::read_symlink(end, error);
  const fs::path target = fs::weakly_canonical(end, error);
  return error ? path : target.string();
}

// The number of an open file that the name stands for.
std::optional<int> open_descriptor(std::string_view path) {
  if (path == "/dev/stdout") return STDOUT_FILENO;
  if (path == "/dev/stderr") return STDERR_FILENO;
  for (const std::string_view folder : {"/dev/fd/", "/proc/self/fd/"})
    if (path.starts_with(folder)) return to_number<int>(path.substr(folder.size()));
  return std::nullopt;
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

bool is_written_in_place(const std::string& path) {
  struct stat status {};
  return open_descriptor(path) ||
         (::stat(path.c_str(), &status) == 0 && (S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode)));
}

OutputFile::OutputFile(const std::string& path, Temporary temporary) : name_(path) {
  if (is_written_in_place(path)) {
    // An open file continues where it is.
    const std::optional<int> open = open_descriptor(path);
    descriptor_ = Descriptor(open ? ::fcntl(*open, F_DUPFD_CLOEXEC, 0) : ::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (!descriptor_.is_open()) fail("cannot be opened");
    return;
  }
  path_ = without_links(path);
  struct stat status {};
  const bool there = ::stat(path_.c_str(), &status) == 0;
  if (there && !S_ISREG(status.st_mode)) {
    throw Error(ErrorKind::config, str(name_, S_ISDIR(status.st_mode) ? ": is a folder" : ": is not a regular file",
                                       " (a file, or a new name)"));
  }
  remove_leftovers(path_);
  if (temporary == Temporary::unnamed) descriptor_ = make_unnamed(path_);
  if (!descriptor_.is_open()) {
    Partial partial = make_partial(path_, false);
    temporary_      = partial.name;
    descriptor_     = std::move(partial.descriptor);
  }
  if (!descriptor_.is_open()) fail("cannot be created");
  if (there) copy_owner_and_mode(status, descriptor_.get());
}

OutputFile::~OutputFile() {
  if (descriptor_.is_open() && !temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::fail(std::string_view doing) const {
  const std::string reason = system_reason(errno);
  throw Error(ErrorKind::backend,
              str(name_, ": ", doing, ": ", reason, so_far_ == 0 ? "" : str(" (after ", so_far_, " bytes)")));
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = ::write(descriptor_.get(), bytes.data(), std::min(bytes.size(), most_at_once));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("cannot be written");
    bytes = bytes.subspan(static_cast<std::size_t>(done));
    so_far_ += done;
  }
}

void OutputFile::keep() {
  if (!path_.empty()) {
    // Some file systems report a full disk only now.
    if (::fsync(descriptor_.get()) != 0) fail("cannot be written");
    const bool named =
        temporary_.empty() ? name_file(descriptor_, path_) : ::rename(temporary_.c_str(), path_.c_str()) == 0;
    if (!named) fail("cannot be renamed");
    const Descriptor folder(::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder.is_open()) ::fsync(folder.get());  // the file is there; a few file systems cannot sync a folder
  }
  if (::close(descriptor_.release()) != 0) fail("cannot be closed");
}

void write_text(const std::string& path, std::string_view text) {
  OutputFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.keep();
}

void write_stream(const std::string& path, const std::function<void(std::ostream&)>& write) {
  OutputFile file(path);
  FileBuffer buffer(file);
  std::ostream out(&buffer);
  out.exceptions(std::ios::badbit);  // rethrows what the buffer throws
  write(out);
  out.flush();
  file.keep();
}

}  // namespace stepgraph
