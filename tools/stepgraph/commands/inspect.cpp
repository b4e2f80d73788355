#include <memory>

#include "engine/base/error.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/commands/inspect_report.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {

void add_inspect(Command program) {
  struct Options {
    std::string path;
    InspectOptions how;
  };
  Command command = program.subcommand("inspect",
                                       "List what a checkpoint, a folder of checkpoints, a Hugging Face folder or a "
                                       ".safetensors file holds");
  auto options    = std::make_shared<Options>();
  command.option("PATH", options->path, "The file or folder").required();
  command.flag(
      "--check", options->how.check,
      "Read all bytes of checkpoints, and compare their hashes. The exit code is 1 if a checkpoint of a folder "
      "is not whole");
  command.flag("--json", options->how.json, "Print JSON lines and nothing else");
  command.footer("Example: stepgraph inspect checkpoints/step-000000100 --check");
  command.run([options] {
    const Inspected found = inspect(options->path, options->how);
    print_line(found.text);
    if (options->how.check && found.num_not_whole > 0)
      throw Error(ErrorKind::run, str(options->path, ": ", found.num_not_whole,
                                      found.num_not_whole == 1 ? " checkpoint is" : " checkpoints are", " not whole"));
  });
}

}  // namespace stepgraph::cli
