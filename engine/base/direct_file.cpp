#include "engine/base/direct_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>

#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"

namespace stepgraph {
namespace {

struct Free {
  void operator()(std::byte* bytes) const noexcept { std::free(bytes); }
};
using Block = std::unique_ptr<std::byte, Free>;

}  // namespace

struct DirectFile::Impl {
  // A buffer that append() fills, or that waits for a thread or is being written.
  struct Filled {
    Block bytes           = {};
    std::size_t size      = 0;  // to be written; 0: free
    std::int64_t position = 0;  // in the file
  };

  std::string path;
  Descriptor descriptor = {};
  std::atomic<bool> direct{true};
  std::array<Filled, 4> buffers = {};
  std::size_t filling           = 0;  // the buffer that append() fills
  std::size_t filled            = 0;  // bytes in it
  std::int64_t handed_over      = 0;  // bytes
  std::int64_t appended         = 0;

  std::mutex mutex               = {};
  std::condition_variable change = {};
  // Under the mutex, like the sizes of buffers.
  std::size_t next  = 0;  // the buffer that a thread takes next
  std::size_t ready = 0;  // buffers that wait for a thread
  int error         = 0;  // errno of the first write that failed
  bool ends         = false;
  // Two, so that the disk has its next write when one is done.
  std::array<std::thread, 2> threads = {};

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      change.wait(lock, [&] { return ready > 0 || ends; });
      if (ready == 0) return;
      Filled& mine = buffers[next];
      next         = (next + 1) % buffers.size();
      --ready;
      const bool failed = error != 0;
      lock.unlock();
      const int reason = failed ? 0 : write(mine.bytes.get(), mine.size, mine.position);
      lock.lock();
      if (reason != 0 && error == 0) error = reason;
      mine.size = 0;
      change.notify_all();
    }
  }

  // Returns 0 or errno.
  int write(const std::byte* from, std::size_t size, std::int64_t at) {
    while (size > 0) {
      const bool was_direct = direct;  // another thread may change it during the write
      const ssize_t done    = ::pwrite(descriptor.get(), from, size, at);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) {
        // The file system opens such files, but cannot write them.
        const int reason = errno;
        if (reason == EINVAL && was_direct && end_direct()) continue;
        return reason;
      }
      if (done == 0) return ENOSPC;
      // After a short write the rest is not aligned.
      if (static_cast<std::size_t>(done) < size && was_direct) static_cast<void>(end_direct());
      from += done;
      size -= static_cast<std::size_t>(done);
      at += done;
    }
    return 0;
  }

  // From now on writes are ordinary ones. A thread that sees `direct` false can rely on it.
  bool end_direct() {
    const int flags = ::fcntl(descriptor.get(), F_GETFL);
    if (flags < 0 || ::fcntl(descriptor.get(), F_SETFL, flags & ~O_DIRECT) != 0) return false;
    direct = false;
    return true;
  }

  [[noreturn]] void fail(std::string_view doing, int reason) const {
    throw Error(ErrorKind::backend, str(path, ": ", doing, ": ", system_reason(reason)));
  }

  // Waits until a buffer is free, or all are.
  void wait_for(std::span<const Filled> wanted) {
    std::unique_lock lock(mutex);
    change.wait(lock, [&] { return std::ranges::all_of(wanted, [](const Filled& each) { return each.size == 0; }); });
    if (error != 0) fail("cannot be written", error);
  }

  void hand_over(std::size_t size) {
    {
      const std::lock_guard lock(mutex);
      buffers[filling].size     = size;
      buffers[filling].position = handed_over;
      ++ready;
    }
    change.notify_all();
    handed_over += static_cast<std::int64_t>(size);
    filling = (filling + 1) % buffers.size();
    filled  = 0;
    wait_for(std::span(&buffers[filling], 1));
  }

  void stop() noexcept {
    {
      const std::lock_guard lock(mutex);
      ends = true;
    }
    change.notify_all();
    for (std::thread& thread : threads)
      if (thread.joinable()) thread.join();
  }
};

DirectFile::DirectFile(std::string path, std::int64_t expected_bytes) : impl_(std::make_unique<Impl>()) {
  impl_->path          = std::move(path);
  constexpr int flags  = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  const auto open_with = [&](int more) { return Descriptor(::open(impl_->path.c_str(), flags | more, 0666)); };
  impl_->descriptor    = open_with(O_DIRECT);
  if (!impl_->descriptor.is_open() && errno == EINVAL) {
    // Some systems have made the file when they notice that it cannot be direct.
    ::unlink(impl_->path.c_str());
    impl_->direct     = false;
    impl_->descriptor = open_with(0);
  }
  if (!impl_->descriptor.is_open()) impl_->fail("cannot be created", errno);
  if (expected_bytes > 0 && ::fallocate(impl_->descriptor.get(), 0, 0, expected_bytes) != 0 &&
      (errno == ENOSPC || errno == EFBIG || errno == EDQUOT))
    impl_->fail("cannot be written", errno);
  for (Impl::Filled& buffer : impl_->buffers) {
    buffer.bytes.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, buffer_bytes)));
    if (!buffer.bytes) throw Error(ErrorKind::backend, str(impl_->path, ": there is no memory for a buffer"));
  }
  Impl* const file = impl_.get();
  try {
    for (std::thread& thread : impl_->threads) thread = std::thread([file] { file->work(); });
  } catch (const std::system_error&) {  // one is enough
    if (!impl_->threads.front().joinable()) throw;
  }
}

DirectFile::~DirectFile() { impl_->stop(); }

void DirectFile::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t now = std::min(bytes.size(), room().size());
    std::memcpy(room().data(), bytes.data(), now);
    bytes = bytes.subspan(now);
    filled(now);
  }
}

std::span<std::byte> DirectFile::room() noexcept {
  return {impl_->buffers[impl_->filling].bytes.get() + impl_->filled, buffer_bytes - impl_->filled};
}

void DirectFile::filled(std::size_t size) {
  Impl& file = *impl_;
  file.filled += size;
  file.appended += static_cast<std::int64_t>(size);
  if (file.filled == buffer_bytes) file.hand_over(buffer_bytes);
}

void DirectFile::finish() {
  Impl& file = *impl_;
  if (file.filled > 0) {
    // The end is written as whole sectors, and cut off.
    const std::size_t whole = (file.filled + alignment - 1) / alignment * alignment;
    std::memset(file.buffers[file.filling].bytes.get() + file.filled, 0, whole - file.filled);
    file.hand_over(whole);
  }
  file.wait_for(file.buffers);
  file.stop();
  if (::ftruncate(file.descriptor.get(), file.appended) != 0) file.fail("cannot be cut", errno);
  if (::fsync(file.descriptor.get()) != 0) file.fail("cannot be written", errno);
  if (::close(file.descriptor.release()) != 0) file.fail("cannot be closed", errno);
}

bool DirectFile::is_direct() const noexcept { return impl_->direct; }
std::int64_t DirectFile::num_bytes() const noexcept { return impl_->appended; }

}  // namespace stepgraph
