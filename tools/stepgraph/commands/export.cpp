#include <filesystem>
#include <iostream>
#include <memory>

#include "engine/base/error.hpp"
#include "graphs/files/checkpoint_reader.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/session/targets.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

struct Options {
  std::string checkpoint, folder;
  std::string type         = "fp32";
  std::int64_t shard_bytes = 0;
  bool force = false, json = false;
};

DType type_of(const std::string& name) {
  if (name == "bf16") return DType::bf16;
  if (name == "fp16") return DType::f16;
  if (name == "fp64") return DType::f64;
  return DType::f32;
}

// The files of the tokenizer, of a run that began with a loaded model whose folder still exists.
std::vector<std::filesystem::path> tokenizer_files(const CheckpointState& state) {
  std::vector<std::filesystem::path> files;
  if (state.config.empty()) return files;
  const JsonValue config = parse_json(state.config, "the config of the checkpoint");
  const JsonValue* model = config.find("model");
  const JsonValue* load  = model != nullptr && model->is_object() ? model->find("load") : nullptr;
  if (load == nullptr || !load->is_string()) return files;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(load->as_string(), failed)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_regular_file(failed) && (name.starts_with("tokenizer") || name.starts_with("vocab") ||
                                          name == "merges.txt" || name == "special_tokens_map.json"))
      files.push_back(entry.path());
  }
  return files;
}

bool is_damaged(const CheckpointReader& reader) {
  try {
    reader.check();
    return false;
  } catch (const Error&) {
    return true;
  }
}

// Exports a checkpoint, or the newest whole one of a folder, and returns which.
CheckpointReader export_newest(const std::string& path, const std::string& folder, ExportOptions options) {
  const std::vector<CheckpointEntry> entries = list_checkpoints(path);
  std::string problem;
  const auto note = [&](const std::string& why) {
    if (problem.empty()) problem = why;
    std::cerr << "stepgraph export: refused: " << why << '\n';
  };
  for (const CheckpointEntry& entry : entries) {
    if (!entry.problem.empty()) {
      note(entry.problem);
      continue;
    }
    CheckpointReader reader(entry.path);
    try {
      options.copies = tokenizer_files(reader.manifest().state);
      export_checkpoint(reader, folder, options);
      return reader;
    } catch (const Error& error) {
      if (!is_damaged(reader)) throw;
      note(error.what());
    }
  }
  if (!entries.empty()) throw Error(ErrorKind::config, str(path, ": no checkpoint is whole; ", problem));
  CheckpointReader reader(path);
  options.copies = tokenizer_files(reader.manifest().state);
  export_checkpoint(reader, folder, options);
  return reader;
}

void run_export(const Options& options) {
  check_model_target("DIR", options.folder, options.force);
  const CheckpointReader reader      = export_newest(options.checkpoint, options.folder,
                                                     {.type = type_of(options.type), .shard_bytes = options.shard_bytes});
  const CheckpointManifest& manifest = reader.manifest();
  if (options.json) {
    print_line(json_line({{"type", "export"},
                          {"checkpoint", reader.folder().string()},
                          {"folder", options.folder},
                          {"step", manifest.state.steps},
                          {"parameters", manifest.num_elements()},
                          {"dtype", options.type}}));
  } else {
    print_line(str(reader.folder().string(), ": ", manifest.num_elements(), " parameters after ", manifest.state.steps,
                   " steps, written to ", options.folder, " as ", options.type));
  }
}

}  // namespace

void add_export(Command program) {
  Command command = program.subcommand(
      "export",
      "Write the weights of a checkpoint as a Hugging Face folder: config.json and model.safetensors. The files of "
      "a tokenizer are copied from the folder of model.load, if the run had one");
  auto options = std::make_shared<Options>();
  command.option("CHECKPOINT", options->checkpoint, "A checkpoint, or a folder of checkpoints: its newest whole one")
      .required();
  command.option("DIR", options->folder, "The folder to write. It changes as a whole; its other files stay").required();
  command.option("--dtype", options->type, "The type of the weights").one_of({"fp32", "bf16", "fp16", "fp64"});
  command
      .option("--shard-size", options->shard_bytes,
              "Write several files of at most this size, with an index; 0: one file. A tensor is never divided")
      .size();
  add_force(command, options->force);
  command.flag("--json", options->json, "Print a JSON line");
  command.footer("Example: stepgraph export checkpoints model --dtype bf16 --shard-size 5GiB");
  command.run([options] { run_export(*options); });
}

}  // namespace stepgraph::cli
