#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "tools/stepgraph/command_line.hpp"

// The files and folders that a command will write. They are checked before hours of work, not after them.
namespace stepgraph::cli {

// Throws Error(config) if no file can be written under that name: the temporary file that would be written first is
// made and removed again. `option` is the option's name, as in --trace.
void check_can_write(std::string_view option, const std::string& path);

enum class FileKind { trace, dot, svg, csv, safetensors, calibration, log };

// Whether a file has the mark that stepgraph puts into files of this kind, even if the rest of it is damaged. Every
// schedule counts as marked.
[[nodiscard]] bool has_mark(const std::string& path, FileKind kind);

// The same, and refuses to replace a file without the mark of stepgraph, unless `force` is set. A name that is free, an
// empty file, a pipe and a device are fine.
void check_target(std::string_view option, const std::optional<std::string>& path, FileKind kind, bool force);

// The same for the folder of a model. Other files and folders in it stay, so they are not a reason to refuse it.
void check_model_target(std::string_view option, const std::optional<std::string>& path, bool force);

// A checkpoint, or a folder of checkpoints.
[[nodiscard]] bool holds_checkpoints(const std::string& folder);

void add_force(Command command, bool& force, std::string_view more = {});

}  // namespace stepgraph::cli
