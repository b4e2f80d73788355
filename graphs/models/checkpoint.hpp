#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/files/safetensors.hpp"
#include "graphs/models/parameters.hpp"

namespace stepgraph {

// The weights of a Hugging Face folder: model.safetensors, or the shards that model.safetensors.index.json names, as
// one set of tensors. Every shard is opened and every tensor is where the index says: throws Error(config) otherwise.
class Checkpoint {
 public:
  explicit Checkpoint(std::filesystem::path folder);

  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }
  [[nodiscard]] std::span<const Safetensors> files() const noexcept { return files_; }
  [[nodiscard]] std::vector<std::string> names() const;  // by name
  [[nodiscard]] bool contains(std::string_view name) const { return by_name_.find(name) != by_name_.end(); }
  [[nodiscard]] const TensorInfo& info(std::string_view name) const { return file_of(name).info(name); }
  [[nodiscard]] const Safetensors& file_of(std::string_view name) const;  // refuses a name that is not there

 private:
  void open_shards(const std::filesystem::path& index);

  std::filesystem::path folder_;
  std::vector<Safetensors> files_;
  std::map<std::string, std::size_t, std::less<>> by_name_;  // into files_
};

// How the checkpoint spells a name: as it is ("transformer.h.0.ln_1.weight"), or without its first word, as bare models
// are saved ("h.0.ln_1.weight", "layers.0.input_layernorm.weight"). Empty: it is not there.
[[nodiscard]] std::string checkpoint_name(const Checkpoint& checkpoint, std::string_view name);

// The tensors that a model needs against those of a checkpoint. Throws one Error(config) that lists what is missing,
// what is not expected, and what has another shape or elements that cannot be read. Buffers that older files hold
// (attention masks, rotary frequencies) are no weights and pass; so does a head where none is expected, if it is the
// embedding it is tied to.
void check_tensors(const Checkpoint& checkpoint, std::span<const Parameter> expected);

// The values of a tensor by the model's name for it, which must have this shape.
void load_tensor(const Checkpoint& checkpoint, std::string_view name, const TensorShape& shape, std::span<float> out);
void load_tensor(const Checkpoint& checkpoint, std::string_view name, const TensorShape& shape, std::span<double> out);

}  // namespace stepgraph
