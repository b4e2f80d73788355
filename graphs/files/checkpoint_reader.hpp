#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/files/checkpoint_manifest.hpp"

namespace stepgraph {

class AlignedBytes;  // graphs/files/files.hpp
class InputFile;

// A training checkpoint, open for reading. The constructor reads the manifest and checks it, and that all files are
// there with their sizes. Throws Error(config) that names the checkpoint and what is wrong: not a checkpoint, partial,
// damaged, of a newer format; and Error(backend) if the system cannot read it for another reason, such as a missing
// permission or too many open files. Up to 256 files stay open, so that they can be read while the folder is removed.
// Hashes are checked when bytes are read. Thread-safe for concurrent reads.
//
//   const sg::CheckpointReader reader("run/step-000000120");
//   std::vector<float> values(reader.num_elements("transformer.wte.weight"));
//   reader.read_tensor("transformer.wte.weight", sg::StateKind::weight, std::span(values));
class CheckpointReader {
 public:
  explicit CheckpointReader(std::filesystem::path folder);

  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }
  [[nodiscard]] const CheckpointManifest& manifest() const noexcept { return manifest_; }
  [[nodiscard]] const CheckpointTensor& tensor(std::string_view name) const;  // throws Error(config): no such tensor
  [[nodiscard]] std::size_t num_elements(std::string_view name) const;

  // All elements of a tensor, put together from its parts. `out` must have as many elements as the tensor. From f64 to
  // float values are rounded. Throws Error(config) for a state that the checkpoint does not have, and for damage.
  void read_tensor(std::string_view name, StateKind state, std::span<float> out) const;
  void read_tensor(std::string_view name, StateKind state, std::span<double> out) const;

  // Reads all bytes and compares their hashes, on `threads` threads. Throws Error(config) that names the first file and
  // tensor that differ.
  void check(int threads = 1) const;

  void check_header(std::size_t file) const;  // all bytes of a file before its parts

  // Blocks [first, first + count) of a part, checked. The bytes lie in `room`, aligned for their type. Throws
  // Error(config) for damage, also where the disk cannot read the file, and Error(backend) for other errors.
  [[nodiscard]] std::span<const std::byte> read_blocks(std::size_t file, const CheckpointPart& part, std::int64_t first,
                                                       std::int64_t count, AlignedBytes& room) const;

 private:
  [[nodiscard]] std::shared_ptr<const InputFile> open(std::size_t file) const;
  template <class T>
  void read_whole(std::string_view name, StateKind state, std::span<T> out) const;

  std::filesystem::path folder_;
  CheckpointManifest manifest_;
  std::vector<std::shared_ptr<const InputFile>> files_;  // null: opened when it is read
};

// A folder of the name `step-...`, in a folder of checkpoints.
struct CheckpointEntry {
  std::string path    = {};
  std::int64_t steps  = 0;      // as its name says
  std::string problem = {};     // empty: the manifest can be read, and the files are there with their sizes
  bool damaged        = false;  // the problem is the checkpoint's; else the system could not read it now
};
// Newest first. Temporary folders are not listed. A folder that does not exist has no checkpoints. Throws Error(config)
// for a path that is no folder.
[[nodiscard]] std::vector<CheckpointEntry> list_checkpoints(const std::string& folder);

// Writes the weights of a checkpoint as a Hugging Face folder: config.json and model.safetensors; or, where they are
// larger than `shard_bytes`, several files and model.safetensors.index.json. The folder changes as a whole, as with
// save_model, and its other files stay. Throws Error(config) if it has weight files of other names, which would be
// mistaken for these, and Error(run) for weights that are not finite.
struct ExportOptions {
  DType type                                = DType::f32;  // or f64, bf16, f16
  std::int64_t shard_bytes                  = 0;           // 0: one file; a tensor is never divided
  std::vector<std::filesystem::path> copies = {};          // other files for the folder, as those of a tokenizer
};
void export_checkpoint(const CheckpointReader& reader, const std::string& folder, const ExportOptions& options = {});

}  // namespace stepgraph
