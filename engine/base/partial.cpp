#include "engine/base/partial.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <random>
#include <string_view>
#include <system_error>
#include <vector>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view digits  = "0123456789abcdef";
constexpr std::size_t num_digits   = 16;
constexpr std::string_view between = ".partial-";

// The partial names of this process; some may have been renamed or removed since.
struct OwnPartials {
  std::timed_mutex placing;  // held while one of them is put in place
  std::timed_mutex mutex;
  std::vector<std::string> names;

  void add(const std::string& name) {
    constexpr std::size_t many = 64;
    const std::lock_guard lock(mutex);
    std::error_code ignored;
    if (names.size() >= many) std::erase_if(names, [&](const std::string& old) { return !fs::exists(old, ignored); });
    names.push_back(name);
  }
};
OwnPartials& own_partials() {
  static OwnPartials all;
  return all;
}

void lock(const Descriptor& descriptor) {
  while (::flock(descriptor.get(), LOCK_EX) != 0 && errno == EINTR) {
  }
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

std::string random_suffix() {
  std::random_device random;
  std::string suffix;
  while (suffix.size() < num_digits) suffix += digits[random() % digits.size()];
  return suffix;
}

bool is_random_suffix(std::string_view text) {
  return text.size() == num_digits && text.find_first_not_of(digits) == text.npos;
}

std::string folder_of(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  return folder.empty() ? "." : folder.string();
}

std::string system_reason(int number) { return std::generic_category().message(number); }

bool is_named(const std::string& name, const Descriptor& descriptor) {
  struct stat named {};
  struct stat open {};
  return ::lstat(name.c_str(), &named) == 0 && ::fstat(descriptor.get(), &open) == 0 && named.st_dev == open.st_dev &&
         named.st_ino == open.st_ino;
}

Partial make_partial(const std::string& path, bool folder) {
  constexpr int attempts = 100;
  for (int attempt = 0; attempt < attempts; ++attempt) {
    const std::string name = str(path, between, random_suffix());
    if (folder && ::mkdir(name.c_str(), 0777) != 0) {
      if (errno == EEXIST) continue;
      return {};
    }
    // O_EXCL and O_NOFOLLOW: a file or link that another user put there is not written.
    const int flags = folder ? O_RDONLY | O_DIRECTORY : O_WRONLY | O_CREAT | O_EXCL;
    Descriptor descriptor(::open(name.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (!descriptor.is_open()) {
      if (errno == EEXIST || (folder && errno == ENOENT)) continue;
      return {};
    }
    lock(descriptor);
    // Another process may have removed it as a leftover just before the lock.
    if (is_named(name, descriptor)) {
      own_partials().add(name);
      return {name, std::move(descriptor)};
    }
  }
  errno = EEXIST;
  return {};
}

Descriptor make_unnamed(const std::string& path) {
  // The names that it may get later.
  struct stat unused {};
  if (::lstat(str(path, between, random_suffix()).c_str(), &unused) != 0 && errno == ENAMETOOLONG) return {};
  Descriptor made(::open(folder_of(path).c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666));
  if (made.is_open() && ::access(str("/proc/self/fd/", made.get()).c_str(), F_OK) != 0) return {};
  if (made.is_open()) lock(made);  // name_file() may give it a partial name for a moment
  return made;
}

bool name_file(const Descriptor& unnamed, const std::string& path) {
  const std::string open = str("/proc/self/fd/", unnamed.get());
  const auto link        = [&](const std::string& name) {
    return ::linkat(AT_FDCWD, open.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0;
  };
  if (link(path)) return true;
  // A link replaces no file, but a rename does.
  for (int attempt = 0; attempt < 100 && errno == EEXIST; ++attempt) {
    const std::string name = str(path, between, random_suffix());
    if (!link(name)) continue;
    if (::rename(name.c_str(), path.c_str()) == 0) return true;
    const int reason = errno;
    ::unlink(name.c_str());
    errno = reason;
    return false;
  }
  return false;
}

PartialsStay::PartialsStay() { own_partials().placing.lock(); }
PartialsStay::~PartialsStay() { own_partials().placing.unlock(); }

bool remove_leftovers(const std::string& path) {
  bool all                = true;
  const std::string begin = str(fs::path(path).filename().string(), between);
  std::error_code error, ignored;
  for (fs::directory_iterator entry(folder_of(path), error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(begin) || !is_random_suffix(std::string_view(name).substr(begin.size()))) continue;
    const Descriptor leftover(::open(entry->path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    // Where the file system has no locks, nothing is removed.
    if (leftover.is_open() && ::flock(leftover.get(), LOCK_EX | LOCK_NB) == 0) {
      fs::remove_all(entry->path(), ignored);
    } else {
      all = false;
    }
  }
  return all;
}

void remove_own_partials() noexcept {
  OwnPartials& own = own_partials();
  // A thread that has stopped for good may hold one of them.
  const std::unique_lock placing(own.placing, std::chrono::milliseconds(100));
  const std::unique_lock lock(own.mutex, std::chrono::milliseconds(100));
  if (!placing || !lock) return;
  for (std::string& name : own.names) {
    // Other threads may still write in a folder and put it in place afterwards, so it loses its name before its files.
    std::string hidden = name;
    hidden.back()      = hidden.back() == '0' ? '1' : '0';
    if (::rename(name.c_str(), hidden.c_str()) != 0) continue;  // most often: no longer there
    name = std::move(hidden);
    // A file whose writer found the folder just before may appear in it.
    constexpr int attempts = 3;
    std::error_code failed;
    for (int attempt = 0; attempt < attempts; ++attempt) {
      fs::remove_all(name, failed);
      if (!failed) break;
    }
  }
}

void copy_owner_and_mode(const struct stat& from, int to) {
  struct stat own {};
  if (::fstat(to, &own) != 0) return;
  const bool same_owner = from.st_uid == own.st_uid && from.st_gid == own.st_gid;
  // Only root can give a file away, but everybody can give it to a group of their own.
  const bool given = same_owner || ::fchown(to, from.st_uid, from.st_gid) == 0 ||
                     ::fchown(to, static_cast<uid_t>(-1), from.st_gid) == 0;
  static_cast<void>(::fchmod(to, from.st_mode & (given ? 07777 : 0777)));
}

void sync_folder(const std::string& path) {
  const auto fail = [&](std::string_view doing) {
    const int reason = errno;
    throw Error(ErrorKind::backend, str(path, ": ", doing, ": ", system_reason(reason)));
  };
  const Descriptor open(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!open.is_open()) fail("cannot be opened");
  if (::fsync(open.get()) != 0 && errno != EINVAL && errno != ENOTSUP) fail("cannot be synced");
}

void create_folder(const std::string& path) {
  fs::path clean = fs::path(path).lexically_normal();
  if (!clean.has_filename()) clean = clean.parent_path();  // a slash at the end
  std::error_code error;
  if (clean.empty() || fs::is_directory(clean, error)) return;
  create_folder(clean.parent_path().string());
  fs::create_directory(clean, error);
  if (error) throw Error(ErrorKind::backend, str(clean.string(), ": cannot be created: ", error.message()));
  sync_folder(folder_of(clean.string()));
}

}  // namespace stepgraph
