#include <memory>

#include "engine/base/error.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/launch.hpp"
#include "tools/stepgraph/output.hpp"

namespace stepgraph::cli {
namespace {

struct Options {
  int num_processes = 1;
  std::vector<std::string> command;
};

void run_launch(const Options& options) {
  if (options.command.front() == "launch")
    throw Error(ErrorKind::config, "launch: the command is 'launch' itself (another one, such as train)");
  flush_output();
  const int code = launch("/proc/self/exe", options.command, {.num_processes = options.num_processes});
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
  command.option("-n,--processes", options->num_processes, "How many processes").required().between(1, 4096);
  command.rest("command", options->command, "The command and its arguments, after --").required();
  command.footer("Example: stepgraph launch -n 2 -- train run.json --set layout.dp=2 --set backend=gloo");
  command.run([options] { run_launch(*options); });
}

}  // namespace stepgraph::cli
