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
// one set of tensors. The constructor opens all shards and checks that each tensor is where the index says; throws
// Error(config) otherwise.
class ModelFolder {
 public:
  explicit ModelFolder(std::filesystem::path folder);

  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }
  [[nodiscard]] std::span<const Safetensors> files() const noexcept { return files_; }
  [[nodiscard]] std::vector<std::string> names() const;  // sorted
  [[nodiscard]] bool contains(std::string_view name) const { return by_name_.find(name) != by_name_.end(); }
  [[nodiscard]] const TensorInfo& info(std::string_view name) const { return file_of(name).info(name); }
  [[nodiscard]] const Safetensors& file_of(std::string_view name) const;  // throws Error(config) for an unknown name

 private:
  void open_shards(const std::filesystem::path& index);

  std::filesystem::path folder_;
  std::vector<Safetensors> files_;
  std::map<std::string, std::size_t, std::less<>> by_name_;  // into files_
};

// The name of a tensor in the folder: the model's ("transformer.h.0.ln_1.weight"), or without its first word, as in
// files of models without a head ("h.0.ln_1.weight"). Empty if the tensor is missing.
[[nodiscard]] std::string tensor_name_in(const ModelFolder& folder, std::string_view name);

// Compares the tensors of a folder with those that a model needs. Throws one Error(config) that lists all missing
// and unexpected tensors, wrong shapes and unreadable types. Buffers in older files (attention masks, rotary
// frequencies) are ignored. So is a head that the model does not have, if it equals the embedding that it is tied to.
void check_tensors(const ModelFolder& folder, std::span<const Parameter> expected);

// Reads a tensor by the model's name for it. Throws Error(config) if it has another shape.
void load_tensor(const ModelFolder& folder, std::string_view name, const TensorShape& shape, std::span<float> out);
void load_tensor(const ModelFolder& folder, std::string_view name, const TensorShape& shape, std::span<double> out);

}  // namespace stepgraph
