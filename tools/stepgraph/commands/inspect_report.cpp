#include "tools/stepgraph/commands/inspect_report.hpp"

#include <filesystem>
#include <map>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/checkpoint_reader.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/models/model_folder.hpp"
#include "ops/transfers/hash.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

namespace fs = std::filesystem;
using Lines  = std::vector<std::string>;

std::string mib(std::int64_t bytes) { return str(short_number(static_cast<double>(bytes) / (1 << 20), 4), " MiB"); }

// Of all parts of a tensor's state, in the order of the files.
std::string hash_of(const CheckpointManifest& manifest, std::size_t tensor, StateKind state) {
  std::uint64_t hash = 0;
  for (const CheckpointFile& file : manifest.files)
    for (const CheckpointPart& part : file.parts)
      if (part.tensor == tensor && part.state == state)
        for (const std::uint64_t each : part.hashes) hash = join_hashes(hash, each);
  return hash_text(hash);
}

void add_checkpoint(Lines& lines, const std::string& path, const InspectOptions& options) {
  const CheckpointReader reader(path);
  if (options.check) reader.check();
  const CheckpointManifest& manifest = reader.manifest();
  const CheckpointState& state       = manifest.state;
  std::vector<std::string> states;
  for (const StateKind kind : all_state_kinds)
    if (manifest.has(kind)) states.emplace_back(to_string(kind));
  if (options.json) {
    JsonValue line = {{"type", "checkpoint"},
                      {"path", path},
                      {"step", state.steps},
                      {"updates", state.updates},
                      {"position", state.position},
                      {"seq", state.seq},
                      {"seed", state.seed},
                      {"optimizer", manifest.optimizer},
                      {"parameters", manifest.num_elements()},
                      {"tensors", manifest.tensors.size()},
                      {"files", manifest.files.size()},
                      {"bytes", manifest.num_bytes()},
                      {"states", states},
                      {"checked", options.check}};
    if (state.loss_scale) line.set("loss_scale", state.loss_scale->scale);
    if (!state.config.empty()) line.set("config", parse_json(state.config, path));
    if (!manifest.model_config.empty()) line.set("model", parse_json(manifest.model_config, path));
    lines.push_back(json_line(line));
  } else {
    lines.push_back(str(path, ": ", state.steps, " steps, ", manifest.num_elements(), " parameters in ",
                        manifest.tensors.size(), " tensors; ",
                        join_text(states, ", ", [](const std::string& name) { return name; }), "; ",
                        manifest.files.size(), manifest.files.size() == 1 ? " file, " : " files, ",
                        mib(manifest.num_bytes()), options.check ? "; all hashes are right" : ""));
    lines.push_back(str("  ", state.position, " sequences of ", state.seq, " tokens were read; seed ", state.seed, "; ",
                        manifest.optimizer,
                        state.loss_scale ? str("; loss scale ", short_number(state.loss_scale->scale)) : ""));
  }
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    const CheckpointTensor& tensor = manifest.tensors[i];
    const std::string hash         = hash_of(manifest, i, StateKind::weight);
    lines.push_back(
        options.json ? json_line({{"type", "tensor"}, {"name", tensor.name}, {"shape", tensor.shape}, {"hash", hash}})
                     : str("  ", hash, "  ", tensor.name, " ", to_string(tensor.shape)));
  }
}

// Returns how many are not whole.
int add_entries(Lines& lines, const std::vector<CheckpointEntry>& entries, const InspectOptions& options) {
  int num_not_whole = 0;
  for (const CheckpointEntry& entry : entries) {
    std::string problem = entry.problem;
    std::int64_t bytes  = 0;
    try {
      if (problem.empty()) {
        const CheckpointReader reader(entry.path);
        bytes = reader.manifest().num_bytes();
        if (options.check) reader.check();
      }
    } catch (const Error& error) {
      problem = error.what();
    }
    num_not_whole += problem.empty() ? 0 : 1;
    if (options.json) {
      JsonValue line = {{"type", "checkpoint"}, {"path", entry.path}, {"step", entry.steps}};
      problem.empty() ? line.set("bytes", bytes) : line.set("problem", problem);
      lines.push_back(json_line(line));
    } else {
      lines.push_back(problem.empty() ? str(entry.path, ": ", entry.steps, " steps, ", mib(bytes),
                                            options.check ? "; all hashes are right" : "")
                                      : str(entry.path, ": not whole: ", problem));
    }
  }
  return num_not_whole;
}

void add_tensors(Lines& lines, const std::string& path, std::span<const Safetensors> files, bool json) {
  struct Tensor {
    std::string type;
    TensorShape shape;
  };
  std::map<std::string, Tensor> tensors;
  std::int64_t elements = 0;
  for (const Safetensors& file : files) {
    for (const std::string& name : file.names()) {
      const TensorInfo& info = file.info(name);
      tensors[name]          = {info.dtype, info.shape};
      elements += num_elements(info.shape);
    }
  }
  lines.push_back(json ? json_line({{"type", "model"},
                                    {"path", path},
                                    {"parameters", elements},
                                    {"tensors", tensors.size()},
                                    {"files", files.size()}})
                       : str(path, ": ", elements, " parameters in ", tensors.size(), " tensors; ", files.size(),
                             files.size() == 1 ? " file" : " files"));
  for (const auto& [name, tensor] : tensors)
    lines.push_back(
        json ? json_line({{"type", "tensor"}, {"name", name}, {"dtype", tensor.type}, {"shape", tensor.shape}})
             : str("  ", tensor.type, "  ", name, " ", to_string(tensor.shape)));
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

}  // namespace

Inspected inspect(const std::string& path, const InspectOptions& options) {
  Lines lines;
  int num_not_whole = 0;
  std::error_code error;
  if (!is_there(path)) throw Error(ErrorKind::config, str(path, ": there is no such file or folder"));
  if (!fs::is_directory(path, error)) {
    const Safetensors file(path);
    add_tensors(lines, path, std::span(&file, 1), options.json);
  } else if (is_there(fs::path(path) / "manifest.json")) {
    add_checkpoint(lines, path, options);
  } else {
    if (is_there(fs::path(path) / "model.safetensors") || is_there(fs::path(path) / "model.safetensors.index.json")) {
      const ModelFolder folder(path);
      add_tensors(lines, path, folder.files(), options.json);
    }
    num_not_whole = add_entries(lines, list_checkpoints(path), options);
    if (lines.empty())
      throw Error(ErrorKind::config, str(path,
                                         ": has no checkpoint and no model (a checkpoint, a folder of them, a "
                                         "Hugging Face folder, or a .safetensors file)"));
  }
  return {.text = join_text(lines, "\n", [](const std::string& line) { return line; }), .num_not_whole = num_not_whole};
}

}  // namespace stepgraph::cli
