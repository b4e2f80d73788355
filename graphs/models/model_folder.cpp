#include "graphs/models/model_folder.hpp"

#include <algorithm>
#include <set>
#include <system_error>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/files.hpp"
#include "graphs/files/json_value.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t most_index_bytes = 100'000'000;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::config, message); }

bool there(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

// The path of a shard must stay inside the folder. Links are followed: download caches consist of links.
bool inside(const std::filesystem::path& name) {
  return !name.empty() && name.is_relative() && std::ranges::find(name, "..") == name.end();
}

// Buffers in files of older versions of transformers.
bool is_buffer(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") || name.ends_with("rotary_emb.inv_freq");
}

constexpr std::string_view head_name = "lm_head.weight";

// The embedding that the head is tied to if the model has no head of its own; empty: none.
std::string_view tied_embedding(std::span<const Parameter> expected) {
  for (const std::string_view name : {"transformer.wte.weight", "model.embed_tokens.weight"})
    if (std::ranges::find(expected, name, &Parameter::name) != expected.end()) return name;
  return {};
}

bool same_values(const ModelFolder& folder, std::string_view a, std::string_view b) {
  if (folder.info(a).shape != folder.info(b).shape) return false;
  constexpr std::int64_t piece = std::int64_t{1} << 17;
  const std::int64_t elements  = num_elements(folder.info(a).shape);
  std::vector<double> x(static_cast<std::size_t>(std::min(piece, elements))), y(x.size());
  for (std::int64_t first = 0; first < elements; first += piece) {
    const auto now = static_cast<std::size_t>(std::min(piece, elements - first));
    folder.file_of(a).read_part(a, first, std::span(x).first(now));
    folder.file_of(b).read_part(b, first, std::span(y).first(now));
    if (!std::equal(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(now), y.begin())) return false;
  }
  return true;
}

// "'a', 'b' and 7 more"
std::string list_text(const std::vector<std::string>& names) {
  constexpr std::size_t most = 8;
  const auto shown           = std::span(names).first(std::min(most, names.size()));
  const std::string text     = join_text(shown, ", ", [](const std::string& name) { return str("'", name, "'"); });
  return names.size() > most ? str(text, " and ", names.size() - most, " more") : text;
}

template <class T>
void load(const ModelFolder& folder, std::string_view name, const TensorShape& shape, std::span<T> out) {
  const std::string spelled = tensor_name_in(folder, name);
  if (spelled.empty()) refuse(str(folder.folder().string(), ": there is no tensor '", name, "'"));
  const Safetensors& file = folder.file_of(spelled);
  if (file.info(spelled).shape != shape)
    refuse(str(file.path().string(), ": '", spelled, "' has shape ", to_string(file.info(spelled).shape), " (",
               to_string(shape), " in the model)"));
  file.read(spelled, out);
}

}  // namespace

ModelFolder::ModelFolder(std::filesystem::path folder) : folder_(std::move(folder)) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder_, error))
    refuse(str(folder_.string(), there(folder_) ? ": is not a folder" : ": there is no such folder",
               " (a folder with config.json and model.safetensors)"));
  const auto single = folder_ / "model.safetensors";
  const auto index  = folder_ / "model.safetensors.index.json";
  if (there(single)) {
    files_.emplace_back(single);
    for (const std::string& name : files_[0].names()) by_name_.emplace(name, 0);
  } else if (there(index)) {
    open_shards(index);
  } else {
    const bool pickled = there(folder_ / "pytorch_model.bin") || there(folder_ / "pytorch_model.bin.index.json");
    refuse(str(folder_.string(), pickled ? ": has only pickled weights, which are not supported" : ": has no weights",
               " (model.safetensors or model.safetensors.index.json)"));
  }
}

void ModelFolder::open_shards(const std::filesystem::path& index) {
  const std::string subject = index.string();
  JsonValue weight_map;
  parse_json_fields(read_text(index, most_index_bytes), subject, [&](const std::string& name, const JsonValue& value) {
    if (name == "weight_map") weight_map = value;
  });
  if (!weight_map.is_object())
    refuse(str(subject, ": the object 'weight_map' is missing (tensor names and their files)"));
  std::map<std::string, std::size_t> numbers;
  for (std::size_t i = 0; i < weight_map.size(); ++i) {
    const std::string& name = weight_map.key[i];
    if (!weight_map[i].is_string()) refuse(str(subject, ": weight_map: '", name, "' is not a file name (\"...\")"));
    const std::string& shard = weight_map[i].text;
    if (!inside(shard))
      refuse(str(subject, ": weight_map: '", name, "' is in '", shard,
                 "', outside the folder (a file inside the folder)"));
    const auto [found, added] = numbers.emplace(shard, files_.size());
    if (added) files_.emplace_back(folder_ / shard);
    if (!files_[found->second].contains(name))
      refuse(str(subject, ": '", name, "' should be in ", shard, ", which does not have it"));
    by_name_.emplace(name, found->second);
  }
  if (by_name_.empty()) refuse(str(subject, ": weight_map is empty (tensor names and their files)"));
  for (std::size_t number = 0; number < files_.size(); ++number) {
    for (const std::string& name : files_[number].names()) {
      const auto found = by_name_.find(name);
      if (found == by_name_.end())
        refuse(str(files_[number].path().string(), ": has a tensor '", name, "' that is not in the index"));
      if (found->second != number)
        refuse(str(files_[number].path().string(), ": has a tensor '", name, "', but the index says it is in ",
                   files_[found->second].path().filename().string()));
    }
  }
}

std::vector<std::string> ModelFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : by_name_) names.push_back(name);
  return names;
}

const Safetensors& ModelFolder::file_of(std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end())
    refuse(str(folder_.string(), ": there is no tensor '", name, "' (the folder has ", by_name_.size(), " tensors)"));
  return files_[found->second];
}

std::string tensor_name_in(const ModelFolder& folder, std::string_view name) {
  if (folder.contains(name)) return std::string(name);
  for (const std::string_view word : {"transformer.", "model."})
    if (name.starts_with(word) && folder.contains(name.substr(word.size())))
      return std::string(name.substr(word.size()));
  return {};
}

void check_tensors(const ModelFolder& folder, std::span<const Parameter> expected) {
  std::vector<std::string> missing, unexpected, wrong;
  std::set<std::string> known;
  for (const Parameter& parameter : expected) {
    const std::string name = tensor_name_in(folder, parameter.name);
    if (name.empty()) {
      missing.push_back(parameter.name);
      continue;
    }
    known.insert(name);
    const TensorInfo& info = folder.info(name);
    if (info.shape != parameter.shape)
      wrong.push_back(str("'", name, "' has shape ", to_string(info.shape), ", not ", to_string(parameter.shape)));
    if (!info.type || !is_float(*info.type))
      wrong.push_back(str("'", name, "' has type ", info.dtype, ", not F64, F32, F16 or BF16"));
  }
  for (const std::string& name : folder.names()) {
    if (known.contains(name) || is_buffer(name)) continue;
    const std::string_view embedding = name == head_name ? tied_embedding(expected) : std::string_view{};
    const std::string tied           = embedding.empty() ? std::string{} : tensor_name_in(folder, embedding);
    if (tied.empty()) {
      unexpected.push_back(name);
    } else if (!same_values(folder, name, tied)) {
      wrong.push_back(str("'", name, "' differs from '", tied, "', but the config ties them"));
    }
  }
  if (missing.empty() && unexpected.empty() && wrong.empty()) return;
  std::vector<std::string> parts;
  if (!missing.empty()) parts.push_back(str("missing ", missing.size(), " tensors: ", list_text(missing)));
  if (!unexpected.empty()) parts.push_back(str("not expected ", unexpected.size(), ": ", list_text(unexpected)));
  if (wrong.size() > 8) {
    const std::size_t more = wrong.size() - 8;
    wrong.resize(8);
    wrong.push_back(str(more, " more such tensors"));
  }
  parts.insert(parts.end(), wrong.begin(), wrong.end());
  refuse(str(folder.folder().string(), ": the weights do not match config.json: ",
             join_text(parts, "; ", [](const std::string& part) { return part; })));
}

void load_tensor(const ModelFolder& folder, std::string_view name, const TensorShape& shape, std::span<float> out) {
  load(folder, name, shape, out);
}
void load_tensor(const ModelFolder& folder, std::string_view name, const TensorShape& shape, std::span<double> out) {
  load(folder, name, shape, out);
}

}  // namespace stepgraph
