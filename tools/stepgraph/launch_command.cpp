#include <algorithm>
#include <memory>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/launch.hpp"
#include "tools/stepgraph/output.hpp"

namespace stepgraph::cli {
namespace {

struct Options {
  std::optional<int> num_processes;
  std::vector<std::string> command;
};

void run_launch(const Options& options, const std::vector<std::string>& known) {
  const std::string example = "as in launch -n 4 -- train run.json";
  if (!options.num_processes)
    throw Error(ErrorKind::config, str("-n is missing (the number of processes, ", example, ")"));
  if (options.command.empty()) throw Error(ErrorKind::config, str("the command is missing (", example, ")"));
  const std::string& name = options.command.front();
  if (name == "launch") throw Error(ErrorKind::config, "the command is 'launch' itself (another one, such as train)");
  if (!name.starts_with('-') && std::ranges::find(known, name) == known.end())
    throw Error(ErrorKind::config, str("unknown command '", name, "': launch runs subcommands of stepgraph (known: ",
                                       join_text(known, ", ", [](const std::string& each) { return each; }), ")"));
  flush_output();
  const int code = launch("/proc/self/exe", options.command, {.num_processes = *options.num_processes});
  if (code != 0) throw Exit{code};
}

}  // namespace

void add_launch(Command program) {
  Command command = program.subcommand(
      "launch",
      "Run a command once for each of N ranks, as processes on this machine. The output of rank 0 passes through; "
      "lines "
      "of the others, and of stderr, are printed to stderr behind their rank. If a rank fails, all are ended, and the "
      "exit code is that of the first failure. In the config, backend is gloo");
  auto options = std::make_shared<Options>();
  command.option("-n,--processes", options->num_processes, "How many processes").between(1, 4096);
  command.rest("command", options->command, "The command and its arguments, after --");
  command.footer("Example: stepgraph launch -n 2 -- train run.json --set layout.dp=2 --set backend=gloo");
  command.run([options, program] { run_launch(*options, program.subcommand_names()); });
}

}  // namespace stepgraph::cli
