#include "graphs/train/checkpoint/checkpoint_folder.hpp"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string_view>
#include <system_error>

#include "engine/base/error.hpp"
#include "engine/base/partial.hpp"
#include "graphs/train/checkpoint.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view mark_of_partial = ".partial-", mark_of_aside = ".aside-";

// Renames to a name that must be free.
void rename_free(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  // rename() refuses a folder that has files.
  if ((errno == EINVAL || errno == ENOSYS) && ::rename(from.c_str(), to.c_str()) == 0) return;
  const int reason = errno;
  throw Error(ErrorKind::backend, str(from, ": cannot be renamed to ", to, ": ", system_reason(reason)));
}

}  // namespace

std::string put_aside_checkpoint(const std::string& path) {
  const fs::path given(path);
  const std::string clean = (given.has_filename() ? given : given.parent_path()).string();
  std::string aside       = str(clean, mark_of_aside, random_suffix());
  rename_free(clean, aside);
  return aside;
}

bool is_in_folder(const std::string& checkpoint, const std::string& folder) {
  if (checkpoint.empty()) return false;
  fs::path path = fs::path(checkpoint).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // a slash at the end
  std::error_code error;
  const auto holds = [&](const fs::path& parent) {
    return fs::equivalent(parent.empty() ? fs::path(".") : parent, folder, error) && !error;
  };
  // The name may be a link, in the folder or to it.
  return holds(path.parent_path()) || holds(fs::weakly_canonical(path, error).parent_path());
}

bool is_whole_checkpoint(const std::string& path) {
  try {
    static_cast<void>(CheckpointReader(path));
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::config) throw;
    return false;
  }
}

void remove_all_leftovers(const std::string& folder) {
  std::set<std::string> bases;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const std::size_t mark = name.find(mark_of_partial);
    if (mark != name.npos && steps_of_checkpoint(std::string_view(name).substr(0, mark)))
      bases.insert((fs::path(folder) / name.substr(0, mark)).string());
  }
  for (const std::string& base : bases) remove_leftovers(base);
}

void put_in_place(const std::string& partial, const std::string& path) {
  const PartialsStay stay;
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(partial, ignored)))  // remove_own_partials() was first: the old one stays
    throw Error(ErrorKind::backend, str(partial, ": cannot be renamed to ", path, ": ", system_reason(ENOENT)));
  if (!fs::exists(fs::symlink_status(path, ignored))) {
    rename_free(partial, path);
  } else if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
    fs::remove_all(partial, ignored);  // the one before
  } else {
    static_cast<void>(put_aside_checkpoint(path));
    rename_free(partial, path);
  }
}

std::vector<std::string> detach_older(const std::string& folder, std::int64_t steps) {
  std::vector<std::string> found, detached;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const auto number = steps_of_checkpoint(entry->path().filename().string());
    if (number && *number < steps) found.push_back(entry->path().string());
  }
  for (const std::string& each : found) {
    std::string name = str(each, mark_of_partial, random_suffix());
    fs::rename(each, name, error);
    if (!error) detached.push_back(std::move(name));
  }
  return detached;
}

void pack(Packer& packer, const CheckpointFile& file) {
  packer.add_text(file.name).add(file.num_bytes).add(file.header_bytes).add(file.header_hash);
  packer.add(static_cast<std::uint64_t>(file.parts.size()));
  for (const CheckpointPart& part : file.parts) {
    packer.add(static_cast<std::uint64_t>(part.tensor)).add(part.state).add(part.type).add(part.dim);
    packer.add(part.begin).add(part.size).add(part.first).add(part.last).add(part.offset);
    packer.add_list(std::span<const std::uint64_t>(part.hashes));
  }
}

void pack(Packer& packer, const std::optional<Error>& error) {
  packer.add(error.has_value());
  if (error) packer.add(error->kind()).add_text(error->what());
}

CheckpointFile unpack_checkpoint_file(Unpacker& received) {
  CheckpointFile file{.name = received.get_text()};
  file.num_bytes    = received.get<std::int64_t>();
  file.header_bytes = received.get<std::int64_t>();
  file.header_hash  = received.get<std::uint64_t>();
  const auto size   = received.get<std::uint64_t>();
  for (std::uint64_t i = 0; i < size; ++i) {
    CheckpointPart part;
    part.tensor = static_cast<std::size_t>(received.get<std::uint64_t>());
    part.state  = received.get<StateKind>();
    part.type   = received.get<DType>();
    part.dim    = received.get<int>();
    part.begin  = received.get<std::int64_t>();
    part.size   = received.get<std::int64_t>();
    part.first  = received.get<std::int64_t>();
    part.last   = received.get<std::int64_t>();
    part.offset = received.get<std::int64_t>();
    part.hashes = received.get_list<std::uint64_t>();
    file.parts.push_back(std::move(part));
  }
  return file;
}

}  // namespace stepgraph
