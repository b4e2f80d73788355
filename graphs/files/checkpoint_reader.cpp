#include "graphs/files/checkpoint_reader.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "engine/base/error.hpp"
#include "graphs/files/files.hpp"
#include "graphs/files/parallel_tasks.hpp"
#include "graphs/files/tensor_box.hpp"
#include "ops/transfers/hash.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t most_manifest_bytes = std::int64_t{1} << 32;
constexpr std::size_t most_open            = 256;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

// Damage is a file that is missing, is not a file, or has bytes that the disk cannot read: Error(config). Other errors,
// such as too many open files or no permission, say nothing about the checkpoint: Error(backend).
[[noreturn]] void refuse_damage(const Error& error, const std::string& before = {}) {
  const auto* const file = dynamic_cast<const FileError*>(&error);
  const bool damaged     = file == nullptr ? error.kind() == ErrorKind::config
                                           : file->number() == ENOENT || file->number() == ENOTDIR || file->number() == EIO;
  throw Error(damaged ? ErrorKind::config : ErrorKind::backend, str(before, error.what()));
}

CheckpointManifest read_manifest(const fs::path& folder) {
  const fs::path path = folder / "manifest.json";
  std::error_code error;
  for (const fs::path& each : {folder, path})
    if (const auto type = fs::status(each, error).type(); type == fs::file_type::none)
      throw Error(error == std::errc::io_error ? ErrorKind::config : ErrorKind::backend,
                  str(each.string(), ": cannot be read: ", error.message()));
  if (!fs::is_directory(folder, error))
    refuse(str(folder.string(), fs::exists(folder, error) ? ": is not a folder" : ": there is no such folder",
               " (a checkpoint: a folder with manifest.json)"));
  if (!fs::exists(path, error)) refuse(str(folder.string(), ": has no manifest.json, so it is no checkpoint"));
  std::string text;
  try {
    text = read_text(path, most_manifest_bytes);
  } catch (const Error& wrong) {
    refuse_damage(wrong);
  }
  return parse_checkpoint_manifest(text, path.string());
}

}  // namespace

CheckpointReader::CheckpointReader(fs::path folder) : folder_(std::move(folder)), manifest_(read_manifest(folder_)) {
  files_.resize(manifest_.files.size());
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const auto file   = open(i);
    const auto wanted = manifest_.files[i].num_bytes;
    if (file->num_bytes() != wanted)
      refuse(str(file->name(), ": has ", file->num_bytes(), " bytes, but the manifest says ", wanted));
    if (files_.size() <= most_open) files_[i] = file;
  }
}

std::shared_ptr<const InputFile> CheckpointReader::open(std::size_t file) const {
  if (files_[file]) return files_[file];
  try {
    return std::make_shared<const InputFile>(folder_ / manifest_.files[file].name);
  } catch (const Error& error) {
    refuse_damage(error, str(folder_.string(), ": a file is missing or cannot be opened: "));
  }
}

void CheckpointReader::check_header(std::size_t file) const {
  const CheckpointFile& wanted = manifest_.files[file];
  const auto opened            = open(file);
  std::vector<std::byte> bytes(static_cast<std::size_t>(wanted.header_bytes));
  try {
    opened->read(0, bytes);
  } catch (const Error& error) {
    refuse_damage(error);
  }
  if (hash_bytes(bytes) != wanted.header_hash)
    refuse(str(opened->name(), ": is damaged: bytes 0 to ", bytes.size(), ", the header, do not have their hash"));
}

const CheckpointTensor& CheckpointReader::tensor(std::string_view name) const {
  const auto found = std::ranges::find(manifest_.tensors, name, &CheckpointTensor::name);
  if (found == manifest_.tensors.end())
    refuse(str(folder_.string(), ": there is no tensor '", name, "' (", manifest_.tensors.size(), " tensors)"));
  return *found;
}

std::size_t CheckpointReader::num_elements(std::string_view name) const {
  return static_cast<std::size_t>(stepgraph::num_elements(tensor(name).shape));
}

std::span<const std::byte> CheckpointReader::read_blocks(std::size_t file, const CheckpointPart& part,
                                                         std::int64_t first, std::int64_t count,
                                                         AlignedBytes& room) const {
  const std::string path   = (folder_ / manifest_.files[file].name).string();
  const std::int64_t begin = first * checkpoint_block_bytes;
  const std::int64_t size  = std::min(count * checkpoint_block_bytes, part.num_bytes() - begin);
  if (first < 0 || count < 1 || size <= (count - 1) * checkpoint_block_bytes)
    refuse(str(path, ": there are no blocks ", first, " to ", first + count, " of a part"));
  std::span<const std::byte> out;
  try {
    out = open(file)->read_direct(part.offset + begin, size, room);
  } catch (const Error& error) {
    refuse_damage(error);
  }
  for (std::int64_t block = 0; block < count; ++block) {
    const auto from  = static_cast<std::size_t>(block * checkpoint_block_bytes);
    const auto bytes = std::min(static_cast<std::size_t>(checkpoint_block_bytes), out.size() - from);
    if (hash_bytes(out.subspan(from, bytes)) != part.hashes[static_cast<std::size_t>(first + block)])
      refuse(str(path, ": is damaged: bytes ", part.offset + begin + block * checkpoint_block_bytes, " to ",
                 part.offset + begin + block * checkpoint_block_bytes + static_cast<std::int64_t>(bytes), ", in ",
                 part.state == StateKind::waiting
                     ? std::string("gradients that wait for their update")
                     : str(to_string(part.state), " of '", manifest_.tensors[part.tensor].name, "'"),
                 ", do not have their hash"));
  }
  return out;
}

template <class T>
void CheckpointReader::read_whole(std::string_view name, StateKind state, std::span<T> out) const {
  const CheckpointTensor& wanted = tensor(name);
  const auto number              = static_cast<std::size_t>(&wanted - manifest_.tensors.data());
  if (out.size() != num_elements(name))
    refuse(str(folder_.string(), ": '", name, "' has ", num_elements(name), " elements, not ", out.size()));
  if (!manifest_.has(state)) refuse(str(folder_.string(), ": has no ", to_string(state), " of its tensors"));
  AlignedBytes room;
  for (std::size_t file = 0; file < manifest_.files.size(); ++file) {
    for (const CheckpointPart& part : manifest_.files[file].parts) {
      if (part.tensor != number || part.state != state) continue;
      const auto size            = static_cast<std::int64_t>(size_bytes(part.type));
      const std::int64_t dim     = wanted.shape.empty() ? 1 : wanted.shape[static_cast<std::size_t>(part.dim)];
      const TensorBox from       = box_of(wanted.shape, part.dim, part.begin, part.size);
      const TensorBox to         = box_of(wanted.shape, part.dim, 0, dim);
      const std::int64_t of_part = num_blocks(part);
      for (std::int64_t block = 0; block < of_part; block += checkpoint_blocks_at_once) {
        const std::int64_t count = std::min(checkpoint_blocks_at_once, of_part - block);
        const std::int64_t begin = block * checkpoint_block_bytes;
        const std::int64_t bytes = std::min(count * checkpoint_block_bytes, part.num_bytes() - begin);
        const auto read          = read_blocks(file, part, block, count, room);
        const std::int64_t first = part.first + begin / size;
        const auto copy          = [&](const auto* values) {
          for_runs(from, first, first + bytes / size, to, [&](std::int64_t a, std::int64_t b, std::int64_t n) {
            std::transform(values + (a - first), values + (a - first + n), out.begin() + b,
                                    [](auto value) { return static_cast<T>(value); });
            return true;
          });
        };
        part.type == DType::f64 ? copy(reinterpret_cast<const double*>(read.data()))
                                : copy(reinterpret_cast<const float*>(read.data()));
      }
    }
  }
}

void CheckpointReader::read_tensor(std::string_view name, StateKind state, std::span<float> out) const {
  read_whole(name, state, out);
}
void CheckpointReader::read_tensor(std::string_view name, StateKind state, std::span<double> out) const {
  read_whole(name, state, out);
}

void CheckpointReader::check(int threads) const {
  struct Task {
    std::size_t file;
    const CheckpointPart* part;
    std::int64_t first;
  };
  std::vector<Task> tasks;
  for (std::size_t file = 0; file < manifest_.files.size(); ++file)
    for (const CheckpointPart& part : manifest_.files[file].parts)
      for (std::int64_t first = 0; first < num_blocks(part); first += checkpoint_blocks_at_once)
        tasks.push_back({file, &part, first});
  for (std::size_t file = 0; file < manifest_.files.size(); ++file) check_header(file);
  for_tasks(tasks.size(), threads, [&](std::size_t i) {
    const auto& [file, part, first] = tasks[i];
    const std::int64_t count        = std::min(checkpoint_blocks_at_once, num_blocks(*part) - first);
    thread_local AlignedBytes room;
    static_cast<void>(read_blocks(file, *part, first, count, room));
  });
}

std::vector<CheckpointEntry> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointEntry> found;
  std::error_code error;
  if (!fs::exists(folder, error)) return found;
  if (!fs::is_directory(folder, error)) refuse(str(folder, ": is not a folder (a folder of checkpoints)"));
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const auto steps = steps_of_checkpoint(entry->path().filename().string());
    if (steps) found.push_back({.path = entry->path().string(), .steps = *steps});
  }
  if (error) refuse(str(folder, ": cannot be read: ", error.message()));
  std::ranges::sort(found, std::ranges::greater{}, &CheckpointEntry::steps);
  for (CheckpointEntry& entry : found) {
    try {
      const CheckpointReader reader(entry.path);
      if (reader.manifest().state.steps != entry.steps)
        refuse(str(entry.path, ": is of step ", reader.manifest().state.steps, ", not of the step in its name"));
    } catch (const Error& wrong) {
      entry.problem = wrong.what();
      entry.damaged = wrong.kind() == ErrorKind::config;
    }
  }
  return found;
}

}  // namespace stepgraph
