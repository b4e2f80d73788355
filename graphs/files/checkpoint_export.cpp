#include <algorithm>
#include <cmath>
#include <set>
#include <system_error>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/output_folder.hpp"
#include "graphs/files/checkpoint_reader.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/files/safetensors.hpp"

namespace stepgraph {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view single = "model.safetensors", index_name = "model.safetensors.index.json";

struct Shard {
  std::string name;
  std::vector<const CheckpointTensor*> tensors;
};

std::int64_t bytes_of(const CheckpointTensor& tensor, DType type) {
  return num_elements(tensor.shape) * static_cast<std::int64_t>(size_bytes(type));
}

std::vector<Shard> shards_of(const CheckpointManifest& manifest, const ExportOptions& options) {
  std::vector<Shard> shards(1);
  std::int64_t bytes = 0;
  for (const CheckpointTensor& tensor : manifest.tensors) {
    const std::int64_t more = bytes_of(tensor, options.type);
    if (options.shard_bytes > 0 && bytes > 0 && more > options.shard_bytes - bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += more;
    shards.back().tensors.push_back(&tensor);
  }
  for (std::size_t i = 0; i < shards.size(); ++i)
    shards[i].name = shards.size() == 1 ? std::string(single)
                                        : str("model-", with_zeros(static_cast<std::int64_t>(i) + 1, 5), "-of-",
                                              with_zeros(std::ssize(shards), 5), ".safetensors");
  return shards;
}

// Weight files of other names would be read instead of the new ones, or beside them.
void refuse_other_weights(const std::string& folder, const std::set<std::string>& names) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool weights     = (name.starts_with("model") && name.ends_with(".safetensors")) || name == index_name;
    if (weights && !names.contains(name))
      throw Error(ErrorKind::config,
                  str(folder, ": has other weights, ", name, ", which would stay (without them, or another folder)"));
  }
}

template <class T>
void read_finite(const CheckpointReader& reader, const std::string& name, std::span<T> out) {
  reader.read_tensor(name, StateKind::weight, out);
  const auto bad = std::ranges::find_if(out, [](T value) { return !std::isfinite(value); });
  if (bad != out.end())
    throw Error(ErrorKind::run,
                str("not exported: element ", bad - out.begin(), " of '", name, "' is ", *bad, " (finite weights)"));
}

std::string config_text(const CheckpointManifest& manifest, DType type) {
  JsonValue config =
      manifest.model_config.empty() ? JsonValue::object() : parse_json(manifest.model_config, "config.json");
  const std::string_view name = type == DType::bf16  ? "bfloat16"
                                : type == DType::f16 ? "float16"
                                : type == DType::f64 ? "float64"
                                                     : "float32";
  // Newer configs of transformers have `dtype`. Without both keys, weights are fp32.
  const bool is_new = config.find("dtype") != nullptr;
  if (is_new) config.set("dtype", std::string(name));
  if (config.find("torch_dtype") != nullptr || (!is_new && type != DType::f32))
    config.set("torch_dtype", std::string(name));
  return json_document(config);
}

}  // namespace

void export_checkpoint(const CheckpointReader& reader, const std::string& folder, const ExportOptions& options) {
  if (!is_float(options.type))
    throw Error(ErrorKind::config, str("export: type ", options.type, " (f32, f64, bf16 or f16)"));
  if (options.shard_bytes < 0)
    throw Error(ErrorKind::config, str("export: shards of ", options.shard_bytes, " bytes (0, or a size)"));
  const CheckpointManifest& manifest = reader.manifest();
  const std::vector<Shard> shards    = shards_of(manifest, options);
  std::set<std::string> names;
  for (const Shard& shard : shards) names.insert(shard.name);
  if (shards.size() > 1) names.insert(std::string(index_name));
  refuse_other_weights(folder, names);
  OutputFolder out(folder);
  const fs::path made = out.temporary();
  JsonValue map       = JsonValue::object();
  std::int64_t total  = 0;
  for (const Shard& shard : shards) {
    std::vector<TensorToWrite> tensors;
    for (const CheckpointTensor* tensor : shard.tensors) {
      TensorToWrite written{.name = tensor->name, .shape = tensor->shape, .type = options.type};
      const auto fill = [&reader, tensor]<class T>(std::span<T> values) { read_finite(reader, tensor->name, values); };
      if (options.type == DType::f64) {
        written.fill = std::function<void(std::span<double>)>(fill);
      } else {
        written.fill = std::function<void(std::span<float>)>(fill);
      }
      tensors.push_back(std::move(written));
      map.add({{tensor->name, JsonValue(shard.name)}});
      total += bytes_of(*tensor, options.type);
    }
    write_safetensors(made / shard.name, tensors, {{"format", "pt"}, {"written_by", "stepgraph"}});
  }
  if (shards.size() > 1)
    write_text(made / index_name, json_document({{"metadata", {{"total_size", total}}}, {"weight_map", map}}));
  write_text(made / "config.json", config_text(manifest, options.type));
  for (const fs::path& copied : options.copies) {
    std::error_code failed;
    fs::copy_file(copied, made / copied.filename(), fs::copy_options::overwrite_existing, failed);
    if (failed)
      throw Error(ErrorKind::backend, str(copied.string(), ": cannot be copied to ", folder, ": ", failed.message()));
  }
  out.keep();
}

}  // namespace stepgraph
