#include "tools/stepgraph/session/targets.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/output_folder.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/checkpoint_reader.hpp"
#include "graphs/files/safetensors.hpp"
#include "graphs/schedule/schedule.hpp"
#include "tools/stepgraph/logs/train_log.hpp"

namespace stepgraph::cli {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(std::string_view option, const std::string& path, std::string_view why) {
  throw Error(ErrorKind::config, str(option, " '", path, "': ", why));
}

[[noreturn]] void refuse_unmarked(std::string_view option, const std::string& path, const std::string& file) {
  refuse(option, path,
         str(file.empty() ? "" : file + " ", "has no mark of stepgraph (a new name, or --force to replace it)"));
}

// The constructor of the writer refuses what cannot be written.
template <class Output>
void try_to_make(std::string_view option, const std::string& path) {
  try {
    const Output probe(path);
  } catch (const Error& error) {
    throw Error(ErrorKind::config, str(option, " ", error.what()));
  }
}

std::string beginning_of(const std::string& path) {
  std::string text(std::size_t{1} << 16, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  return text;
}

// Whether the first row consists of actions. If the text ends within the row, its last action may be cut.
bool is_schedule(std::string_view text) {
  const std::size_t end                 = text.find_first_of("\r\n");
  std::vector<std::string_view> actions = split_text(text.substr(0, end), ',');
  if (end == text.npos && actions.size() > 1) actions.pop_back();
  try {
    for (const std::string_view action : actions) static_cast<void>(parse_action(action));
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool is_own_safetensors(const std::string& path) {
  try {
    const Safetensors file(path);
    const auto mark = file.metadata().find("written_by");
    return mark != file.metadata().end() && mark->second == "stepgraph";
  } catch (const Error&) {
    return false;
  }
}

// A model that stepgraph has written: one file, or several with an index.
bool is_own_model(const fs::path& folder) {
  if (is_own_safetensors((folder / "model.safetensors").string())) return true;
  std::error_code error;
  if (!fs::exists(folder / "model.safetensors.index.json", error)) return false;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("model-00001-of-") && is_own_safetensors(entry->path().string())) return true;
  }
  return false;
}

// A file with contents.
bool holds_something(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error) && (!fs::is_regular_file(path, error) || fs::file_size(path, error) > 0);
}

}  // namespace

bool has_mark(const std::string& path, FileKind kind) {
  if (kind == FileKind::safetensors) return is_own_safetensors(path);
  std::string text = beginning_of(path);
  const auto has   = [&](std::string_view mark) { return text.find(mark) != text.npos; };
  switch (kind) {
    case FileKind::trace:
      return has("\"written_by\":\"stepgraph\"");
    case FileKind::dot:
      return text.starts_with("digraph stepgraph {");
    case FileKind::svg:  // the second: what Graphviz makes of the graph's name
      return has("<!-- stepgraph -->") || has("<!-- Title: stepgraph ");
    case FileKind::csv:
      return is_schedule(text);
    case FileKind::calibration:
      std::erase_if(text, [](char letter) { return letter == ' ' || letter == '\n' || letter == '\r'; });
      return has("\"type\":\"machine\"");
    case FileKind::log:
      return text.starts_with(TrainLog::csv_header) || text.starts_with("{\"type\":\"step\",") ||
             text.starts_with("{\"type\":\"eval\",");
    case FileKind::safetensors:
      break;
  }
  return false;
}

void check_can_write(std::string_view option, const std::string& path) {
  if (path.empty()) refuse(option, path, "is empty (a file name)");
  if (is_written_in_place(path)) return;
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty() && !fs::is_directory(folder, error))
    refuse(option, path, str("there is no folder ", folder.string(), " (an existing folder)"));
  try_to_make<OutputFile>(option, path);
}

void check_target(std::string_view option, const std::optional<std::string>& path, FileKind kind, bool force) {
  if (!path) return;
  check_can_write(option, *path);
  if (!force && !is_written_in_place(*path) && holds_something(*path) && !has_mark(*path, kind))
    refuse_unmarked(option, *path, "");
}

bool holds_checkpoints(const std::string& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return false;
  return fs::exists(fs::path(folder) / "manifest.json", error) || !list_checkpoints(folder).empty();
}

void check_model_target(std::string_view option, const std::optional<std::string>& path, bool force) {
  if (!path) return;
  if (path->empty()) refuse(option, *path, "is empty (a folder name)");
  try_to_make<OutputFolder>(option, *path);
  const fs::path folder = *path;
  std::error_code error;
  for (const char* name : {"config.json", "model.safetensors"})
    if (fs::is_directory(folder / name, error)) refuse(option, *path, str(name, " in it is a folder (a file)"));
  if (holds_checkpoints(*path)) refuse(option, *path, "holds checkpoints (another folder for the model)");
  if (force || is_own_model(folder)) return;
  for (const char* name : {"config.json", "model.safetensors", "model.safetensors.index.json"})
    if (holds_something(folder / name)) refuse_unmarked(option, *path, str(name, " in it"));
}

void add_force(Command command, bool& force, std::string_view more) {
  command.flag("--force", force, str("Replace files that have no mark of stepgraph", more));
}

}  // namespace stepgraph::cli
