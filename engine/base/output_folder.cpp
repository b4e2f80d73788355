#include "engine/base/output_folder.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <system_error>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view before = ".old-", after = ".new-";

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

// Without links, and without a slash at the end.
std::string resolved(const std::string& path, std::error_code& error) {
  const fs::path full = fs::weakly_canonical(fs::absolute(path, error), error).lexically_normal();
  return full.has_filename() ? full.string() : full.parent_path().string();
}

bool is_mount_point(const std::string& path) {
  struct statx status {};
  if (::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &status) == 0 &&
      (status.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0)
    return (status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
  struct stat own {};
  struct stat parent {};
  return ::lstat(path.c_str(), &own) == 0 && ::stat(folder_of(path).c_str(), &parent) == 0 &&
         own.st_dev != parent.st_dev;
}

bool is_or_holds(const fs::path& folder, const fs::path& other) {
  return std::mismatch(folder.begin(), folder.end(), other.begin(), other.end()).first == folder.end();
}

void sync(const std::string& path) {
  const Descriptor open(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (open.is_open()) ::fsync(open.get());  // a few file systems cannot sync a folder
}

// EXDEV: a folder of the lower layer of an overlay, such as that of a container's image, cannot be renamed.
bool has_no_exchange(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == EXDEV; }

// Whether a file is a temporary one that an earlier version left: NAME.PID-NUMBER.partial, where NAME is in `to`.
bool is_old_leftover(std::string name, const fs::path& to) {
  constexpr std::string_view end = ".partial", digits = "0123456789";
  if (!name.ends_with(end)) return false;
  name.resize(name.size() - end.size());
  const auto take_number = [&] {
    const std::size_t last = name.find_last_not_of(digits);
    const bool found       = last != name.npos && last + 1 < name.size();
    if (found) name.resize(last + 1);
    return found;
  };
  if (!take_number() || !name.ends_with('-')) return false;
  name.pop_back();
  if (!take_number() || !name.ends_with('.')) return false;
  name.pop_back();
  std::error_code error;
  return !name.empty() && fs::exists(to / name, error);
}

// The first mount point inside a folder; empty: none.
std::string mount_point_in(const fs::path& folder) {
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, fs::directory_options::skip_permission_denied, error), end;
       !error && entry != end; entry.increment(error)) {
    std::error_code gone;
    const fs::file_status status = entry->symlink_status(gone);
    if (!gone && fs::is_directory(status) && is_mount_point(entry->path())) return entry->path().string();
  }
  return {};
}

// Renames to a name that must be free. Returns whether it was.
bool rename_to_free(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return true;
  // rename() refuses a folder that has files.
  return has_no_exchange(errno) && ::rename(from.c_str(), to.c_str()) == 0;
}

// Two processes that replace the same folder do so one after another. A lock that is held for seconds belongs to
// another program; the exchange is safe without it.
void lock_for_a_while(const Descriptor& folder) {
  constexpr int attempts    = 500;
  constexpr timespec moment = {.tv_sec = 0, .tv_nsec = 10'000'000};
  for (int i = 0; i < attempts && ::flock(folder.get(), LOCK_EX | LOCK_NB) != 0; ++i) {
    if (errno != EWOULDBLOCK && errno != EINTR) return;
    ::nanosleep(&moment, nullptr);
  }
}

// Gives `to` all files of `from` whose names it does not have. Temporary files of earlier versions are left out; they
// were never in a folder inside.
void carry_over(const fs::path& from, const fs::path& to, bool inside = false) {
  const auto fail = [](const fs::path& file, const std::string& reason) {
    throw Error(ErrorKind::backend, str(file.string(), ": cannot be carried over: ", reason));
  };
  std::error_code error;
  for (fs::directory_iterator entry(from, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path there = to / entry->path().filename();
    struct stat status {};
    if (::lstat(entry->path().c_str(), &status) != 0) continue;  // removed meanwhile
    if (!inside && S_ISREG(status.st_mode) && is_old_leftover(entry->path().filename().string(), to)) continue;
    if (S_ISDIR(status.st_mode)) {
      if (is_mount_point(entry->path())) fail(entry->path(), "is a mount point");
      if (::mkdir(there.c_str(), 0700) != 0 && errno != EEXIST) fail(entry->path(), system_reason(errno));
      carry_over(entry->path(), there, true);
      const Descriptor made(::open(there.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (made.is_open()) copy_owner_and_mode(status, made.get()), ::fsync(made.get());
    } else if (::linkat(AT_FDCWD, entry->path().c_str(), AT_FDCWD, there.c_str(), 0) != 0 && errno != EEXIST &&
               errno != ENOENT) {
      // The file system has no links, or the file is another user's.
      fs::copy(entry->path(), there, fs::copy_options::copy_symlinks, error);
      if (error) fail(entry->path(), error.message());
      sync(there);
    }
  }
  if (error) fail(from, error.message());
}

// Makes `to`, a folder with all files of `from`. It appears when it is complete.
void copy_folder(const std::string& from, const std::string& to) {
  const auto fail    = [&] { throw Error(ErrorKind::backend, str(to, ": cannot be created: ", system_reason(errno))); };
  const Partial copy = make_partial(from, true);
  struct stat status {};
  if (!copy.descriptor.is_open() || ::stat(from.c_str(), &status) != 0) fail();
  carry_over(from, copy.name);
  copy_owner_and_mode(status, copy.descriptor.get());
  ::fsync(copy.descriptor.get());
  if (!rename_to_free(copy.name, to)) fail();
  sync(folder_of(to));
}

}  // namespace

OutputFolder::OutputFolder(const std::string& path) : name_(path) {
  if (path.empty()) refuse("folder: the name is empty (a folder name)");
  std::error_code error;
  path_ = resolved(path, error);
  if (error) refuse(str(path, ": ", error.message(), " (a folder, or a new name)"));
  const fs::file_status status = fs::symlink_status(path_, error);
  if (fs::exists(status) && !fs::is_directory(status))
    refuse(str(path, fs::is_symlink(status) ? ": is a link that leads nowhere" : ": is not a folder",
               " (a folder, or a new name)"));
  const char* const inside = "a folder inside it, such as model";
  if (fs::exists(status) && is_mount_point(path_))
    refuse(str(path, ": is a mount point, which cannot be replaced at once (", inside, ")"));
  if (const std::string mounted = mount_point_in(path_); !mounted.empty())
    refuse(str(path, ": ", mounted, " in it is a mount point, so it cannot be replaced (", inside, ")"));
  if (const fs::path here = fs::current_path(error); !error && is_or_holds(path_, here))
    refuse(str(path, ": is the current folder or holds it, so it cannot be replaced (", inside, ")"));
  fs::create_directories(folder_of(path_), error);
  if (error) throw Error(ErrorKind::backend, str(path, ": cannot be created: ", error.message()));
  remove_leftovers(path_);
  Partial partial = make_partial(path_, true);
  if (!partial.descriptor.is_open())
    fail(str("cannot be created or replaced: a new folder in ", folder_of(path_), " is needed"));
  temporary_  = partial.name;
  descriptor_ = partial.descriptor.release();
  // Before the first file is written: the files of a private folder stay private.
  if (struct stat old{}; ::stat(path_.c_str(), &old) == 0) {
    old.st_mode |= S_IRWXU;
    copy_owner_and_mode(old, descriptor_);
  }
}

OutputFolder::~OutputFolder() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFolder::fail(std::string_view doing) const {
  const std::string reason = system_reason(errno);
  throw Error(ErrorKind::backend, str(name_, ": ", doing, ": ", reason));
}

void OutputFolder::keep() {
  try {
    put_in_place();
  } catch (const Error& error) {
    // The new files are complete, and computing them may have taken days: they are not removed.
    std::string kept = std::exchange(temporary_, {});
    if (const std::string ready = str(path_, after, random_suffix()); ::rename(kept.c_str(), ready.c_str()) == 0)
      kept = ready;
    throw Error(error.kind(), str(error.what(), " (the new files are in ", kept, ")"));
  }
  temporary_.clear();
  ::close(std::exchange(descriptor_, -1));  // the lock: the next one can begin
}

void OutputFolder::put_in_place() {
  const PartialsStay stay;
  for (;;) {
    const Descriptor old(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!old.is_open()) {
      if (errno != ENOENT) fail("cannot be opened");
      ::fsync(descriptor_);
      if (rename_to_free(temporary_, path_)) return sync(folder_of(path_));
      if (errno != EEXIST && errno != ENOTEMPTY) fail("cannot be created");
      continue;  // another process has just made it
    }
    lock_for_a_while(old);
    if (!is_named(path_, old)) continue;  // another process has just replaced it
    struct stat status {};
    if (::fstat(old.get(), &status) == 0) copy_owner_and_mode(status, descriptor_);
    carry_over(path_, temporary_);
    ::fsync(descriptor_);
    const std::string replaced = exchange();
    sync(folder_of(path_));
    return remove_replaced(replaced);
  }
}

void OutputFolder::remove_replaced(const std::string& replaced) const {
  try {
    carry_over(replaced, path_);  // files that came while the folders were exchanged
    std::error_code ignored;      // the next OutputFolder tries again
    fs::remove_all(replaced, ignored);
  } catch (const Error&) {
    static_cast<void>(::rename(replaced.c_str(), str(path_, before, random_suffix()).c_str()));
  }
}

// Puts the new folder in place and returns the name that the old one has now.
std::string OutputFolder::exchange() {
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) == 0) return temporary_;
  if (!has_no_exchange(errno)) fail("cannot be replaced");
  const std::string suffix = random_suffix(), ready = str(path_, after, suffix), replaced = str(path_, before, suffix);
  if (!rename_to_free(temporary_, ready)) fail("cannot be replaced");
  temporary_ = ready;
  if (::rename(path_.c_str(), replaced.c_str()) != 0) {
    if (errno != EXDEV) fail("cannot be replaced");
    copy_folder(path_, replaced);
    std::error_code error;
    fs::remove_all(path_, error);
    if (error) {
      errno = error.value();
      fail("cannot be removed");
    }
  }
  if (rename_to_free(ready, path_)) return replaced;
  const int reason = errno;
  static_cast<void>(rename_to_free(replaced, path_));
  errno = reason;
  fail("cannot be replaced");
}

std::vector<std::string> interrupted_folders(const std::string& path) {
  std::vector<std::string> found;
  std::error_code error;
  const std::string full = resolved(path, error), name = fs::path(full).filename().string();
  for (fs::directory_iterator entry(folder_of(full), error), end; !error && entry != end; entry.increment(error)) {
    const std::string other = entry->path().filename().string();
    for (const std::string_view word : {before, after}) {
      const std::string begin = str(name, word);
      if (other.starts_with(begin) && is_random_suffix(std::string_view(other).substr(begin.size())))
        found.push_back(entry->path().string());
    }
  }
  std::ranges::sort(found);
  return found;
}

}  // namespace stepgraph
