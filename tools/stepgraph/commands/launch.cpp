#include <algorithm>
#include <memory>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/processes/launch.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

struct Options {
  std::optional<int> num_processes, restarts, restart_ranks;
  std::vector<std::string> restart_set;
  std::vector<std::string> command;
};

// The command after a failure: a run goes on from its last checkpoint.
std::vector<std::string> restart_command(const Options& options) {
  std::vector<std::string> words = options.command;
  if (words.front() == "train") words.push_back("--restarted");
  for (const std::string& set : options.restart_set) words.insert(words.end(), {"--set", set});
  return words;
}

void check_restarts(const Options& options) {
  for (const auto& [name, is_set] : {std::pair("--restart-ranks", options.restart_ranks.has_value()),
                                     std::pair("--restart-set", !options.restart_set.empty())}) {
    if (is_set && options.restarts.value_or(0) == 0)
      throw Error(ErrorKind::config, str(name, " has no effect without --restarts (--restarts 1 or more)"));
  }
  for (const std::string& set : options.restart_set) {
    if (set.find('=') == set.npos)
      throw Error(ErrorKind::config, str("--restart-set '", set, "': has no value (path=value, as in layout.dp=1)"));
  }
}

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
  check_restarts(options);
  flush_output();
  std::vector<std::string> command = options.command;
  if (name == "train" && options.restarts.value_or(0) > 0) command.push_back("--restartable");
  const int code = launch("/proc/self/exe", command,
                          {.num_processes     = *options.num_processes,
                           .restarts          = options.restarts.value_or(0),
                           .restart_processes = options.restart_ranks.value_or(0),
                           .restart_arguments = restart_command(options)});
  if (code != 0) throw Exit{code};
}

}  // namespace

void add_launch(Command program) {
  Command command = program.subcommand(
      "launch",
      "Run a command once for each of N ranks, as processes on this machine. The output of rank 0 passes through; "
      "lines "
      "of the others, and of stderr, are printed to stderr behind their rank. If a rank fails, all are ended, and the "
      "exit code is that of the first failure. In the config, backend is gloo or nccl");
  auto options = std::make_shared<Options>();
  command.option("-n,--processes", options->num_processes, "How many processes").between(1, 4096);
  command
      .option("--restarts", options->restarts,
              "Start all processes again, at most this often, after one was ended by a signal or has failed with exit "
              "code 3 (default: 0). train then goes on from the last checkpoint, as with --resume")
      .between(0, 1'000'000);
  command.option("--restart-ranks", options->restart_ranks, "How many processes from the first restart on (default: N)")
      .between(1, 4096);
  command.repeated("--restart-set", options->restart_set,
                   "path=value: a --set that is added to the command from the first restart on, as layout.dp=1 for "
                   "fewer processes. May be repeated");
  command.rest("command", options->command, "The command and its arguments, after --");
  command.footer(
      "Example: stepgraph launch -n 2 -- train run.json --set layout.dp=2 --set backend=gloo\n"
      "Example: stepgraph launch -n 4 --restarts 3 -- train run.json --set layout.dp=4 --set backend=gloo --set "
      "checkpoint.folder=checkpoints --set checkpoint.every=100");
  command.run([options, program] { run_launch(*options, program.subcommand_names()); });
}

}  // namespace stepgraph::cli
