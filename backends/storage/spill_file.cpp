#include "backends/storage/spill_file.hpp"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "backends/storage/requests.hpp"
#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"
#include "engine/base/text.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t block = Storage::block_bytes;
constexpr std::string_view larger_files =
    "(a larger limit of file sizes, ulimit -f, or a folder on another file system)";

std::string reason(int error) { return std::generic_category().message(error); }

// A file without a name, open for reading and writing; -1: errno says why not. Some file systems have no O_TMPFILE.
int open_nameless(const std::string& folder) {
  const int made = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (made >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return made;
  std::string name = str(folder, "/stepgraph-spill-XXXXXX");
  const int named  = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) (void)unlink(name.c_str());
  return named;
}

// The same file with other flags, by the name that the kernel gives to open files.
int open_again(int file, int flags) {
  std::string name = std::to_string(file);
  name.insert(0, "/proc/self/fd/");
  return open(name.c_str(), flags);
}

}  // namespace

class SpillFile::Impl {
 public:
  Impl(std::string folder, Rank rank, std::int64_t size, const SpillOptions& options)
      : folder_(std::move(folder)), rank_(rank), size_(size), options_(options) {
    buffered_ = Descriptor(open_nameless(folder_));
    if (!buffered_.is_open()) {
      const int error = errno;
      throw Error(ErrorKind::backend,
                  str(name(), ": cannot make a file: ", reason(error), " (a folder that exists and can be written)"));
    }
    reserve();
    if (options_.direct) direct_ = Descriptor(open_again(buffered_.get(), O_RDWR | O_DIRECT | O_CLOEXEC));
    direct_works_ = direct_.is_open();
    if (options_.io_uring) ring_ = make_ring(options_.depth);
  }

  void transfer(bool writes, std::int64_t offset, std::byte* bytes, std::size_t count) {
    const auto size = static_cast<std::int64_t>(count);
    if (offset < 0 || offset + size > size_) {
      throw Error(ErrorKind::backend,
                  str(name(), ": bytes ", offset, " to ", offset + size, ", but it has ", size_, " bytes"));
    }
    std::vector<Request> requests;
    const auto add = [&](bool direct, std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = begin; at < end; at += options_.request_bytes) {
        requests.push_back({.file   = direct ? direct_.get() : buffered_.get(),
                            .writes = writes,
                            .offset = offset + at,
                            .bytes  = bytes + at,
                            .size   = std::min(options_.request_bytes, end - at)});
      }
    };
    const bool aligned       = offset % block == 0 && reinterpret_cast<std::intptr_t>(bytes) % block == 0;
    const std::int64_t whole = direct_works_ && aligned ? size / block * block : 0;
    add(true, 0, whole);
    add(false, whole, size);
    std::optional<Failure> failure = run(requests);
    if (failure && failure->error == EINVAL && whole > 0) {  // the file system refuses direct transfers after all
      direct_works_ = false;
      requests.clear();
      add(false, 0, size);
      failure = run(requests);
    }
    if (failure) fail(*failure);
  }

  [[nodiscard]] std::int64_t size() const { return size_; }
  [[nodiscard]] bool uses_io_uring() const { return ring_ != nullptr; }
  [[nodiscard]] bool is_direct() const { return direct_works_; }

 private:
  [[nodiscard]] std::string name() const { return str("storage: spill file of rank ", rank_, " in '", folder_, "'"); }

  // Bytes that are free on the file system; none: it does not tell.
  [[nodiscard]] std::optional<double> free_bytes() const {
    struct statvfs info {};
    if (fstatvfs(buffered_.get(), &info) != 0 || info.f_blocks == 0) return std::nullopt;
    return static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize);
  }
  [[nodiscard]] std::string free_text() const {
    const std::optional<double> free = free_bytes();
    return free ? bytes_text(*free) : "an unknown number of bytes";
  }

  // Bytes of the file are zero until they are written. Where room cannot be reserved, the file has holes.
  void reserve() {
    if (size_ == 0) return;
    // Asked first: reserving too much would fill the disk before it fails, and other programs would notice.
    const std::optional<double> free = free_bytes();
    int error                        = free && *free < static_cast<double>(size_) ? ENOSPC : EINTR;
    while (error == EINTR) error = fallocate(buffered_.get(), 0, 0, size_) == 0 ? 0 : errno;
    if (error == EOPNOTSUPP || error == ENOSYS) error = ftruncate(buffered_.get(), size_) == 0 ? 0 : errno;
    if (error == 0) return;
    const std::string needs = str(name(), ": needs ", bytes_text(static_cast<double>(size_)));
    if (error == EFBIG) throw Error(ErrorKind::backend, str(needs, ": ", reason(error), " ", larger_files));
    const bool full = error == ENOSPC || error == EDQUOT;
    throw Error(ErrorKind::backend, str(needs, ", ", free_text(), " are free: ", reason(error),
                                        full ? " (free space, or name another folder)" : ""));
  }

  [[nodiscard]] std::optional<Failure> run(std::vector<Request>& requests) {
    return ring_ != nullptr ? ring_->run(requests) : run_with_threads(requests, options_.threads);
  }

  [[noreturn]] void fail(const Failure& failure) const {
    const std::string where =
        str(name(), ": ", failure.writes ? "writing " : "reading ", failure.size, " bytes at ", failure.offset, ": ");
    if (failure.error != 0) {
      throw Error(ErrorKind::backend, str(where, reason(failure.error),
                                          failure.error == ENOSPC  ? str(" (", free_text(), " are free; free space)")
                                          : failure.error == EFBIG ? str(" ", larger_files)
                                                                   : std::string()));
    }
    throw Error(ErrorKind::backend, str(where, "only ", failure.done, failure.writes ? " were written" : " are there",
                                        " (the file must keep its ", size_, " bytes)"));
  }

  std::string folder_;
  Rank rank_;
  std::int64_t size_;
  SpillOptions options_;
  Descriptor buffered_, direct_;
  std::atomic<bool> direct_works_{false};
  std::unique_ptr<RequestRing> ring_;
};

SpillFile::SpillFile(std::string folder, Rank rank, std::int64_t size_bytes, const SpillOptions& options)
    : impl_(std::make_unique<Impl>(std::move(folder), rank, size_bytes, options)) {}
SpillFile::~SpillFile() = default;

std::int64_t SpillFile::size_bytes() const noexcept { return impl_->size(); }
bool SpillFile::uses_io_uring() const noexcept { return impl_->uses_io_uring(); }
bool SpillFile::is_direct() const noexcept { return impl_->is_direct(); }

void SpillFile::read(std::int64_t offset, std::span<std::byte> to) {
  impl_->transfer(/*writes=*/false, offset, to.data(), to.size());
}

// Requests have one pointer for both ways; a write does not change what it points at.
void SpillFile::write(std::int64_t offset, std::span<const std::byte> from) {
  impl_->transfer(/*writes=*/true, offset, const_cast<std::byte*>(from.data()), from.size());
}

MakeStorage spill_files(std::string folder, SpillOptions options) {
  const auto refuse = [](std::string_view what, std::int64_t given, std::string_view right) {
    throw Error(ErrorKind::config, str("storage: SpillOptions::", what, " is ", given, " (", right, ")"));
  };
  if (options.request_bytes < block || options.request_bytes % block != 0)
    refuse("request_bytes", options.request_bytes, str("a multiple of ", block));
  if (options.depth < 1 || options.depth > 1024) refuse("depth", options.depth, "1 to 1024");
  if (options.threads < 1 || options.threads > 64) refuse("threads", options.threads, "1 to 64");
  return [folder = std::move(folder), options](Rank rank, std::int64_t size_bytes) -> std::unique_ptr<Storage> {
    return std::make_unique<SpillFile>(folder, rank, size_bytes, options);
  };
}

}  // namespace stepgraph
