#include "tools/stepgraph/program.hpp"

#include <exception>
#include <iostream>
#include <new>

#include "backends/init_world.hpp"
#include "engine/base/error.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/terminal/interrupt.hpp"
#include "tools/stepgraph/terminal/output.hpp"

#if defined(STEPGRAPH_WITH_CUDA)
#include "backends/cuda/devices.hpp"
#endif

namespace {

namespace sg = stepgraph;

std::string version() {
  std::string text = sg::str("stepgraph ", STEPGRAPH_VERSION, "\n");
  for (const char* const backend : {"gloo", "mpi", "nccl"})
    text += sg::str(backend, ": ", sg::has_process_backend(backend) ? "" : "not ", "built in\n");
#if defined(STEPGRAPH_WITH_CUDA)
  text += sg::describe_cuda() + "\n";
#else
  text += "CUDA: not built in (preset `cuda` adds it)\n";
#endif
  return text;
}

}  // namespace

int stepgraph::cli::run_program(int argc, char** argv) {
  sg::cli::CommandLine line("stepgraph", "Stepgraph: training steps as task graphs, proved before they run.");
  sg::cli::Command program = line.command();
  program.footer(
      "Exit codes: 0 done, 1 the run failed or a result is wrong, 2 wrong usage or config, 3 the backend or the system "
      "failed. After a signal that ended a run early: 130 SIGINT (Ctrl-C), 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1.\n"
      "Example: stepgraph train run.json --steps 100");
  program.require_subcommand();
  program.print_flag("--version", "Print the version and the built-in backends", version);
  sg::cli::add_train(program);
  sg::cli::add_eval(program);
  sg::cli::add_generate(program);
  sg::cli::add_graph(program);
  sg::cli::add_verify(program);
  sg::cli::add_plan_memory(program);
  sg::cli::add_simulate(program);
  sg::cli::add_schedule(program);
  sg::cli::add_bench(program);
  sg::cli::add_launch(program);
  sg::cli::add_flight(program);
  sg::cli::add_export(program);
  sg::cli::add_inspect(program);
  sg::cli::ignore_signals_of_writes();

  try {
    line.run(argc, argv);
    sg::cli::flush_output();
    return 0;
  } catch (const sg::cli::Exit& end) {
    return end.code;
  } catch (const sg::cli::OutputClosed&) {
    return 0;
  } catch (const sg::cli::UsageError& error) {
    std::cerr << error.what() << "\n";
    return 2;
  } catch (const sg::cli::Interrupted& end) {
    std::cerr << line.path() << ": " << end.what() << "\n";
    return 128 + end.signal;
  } catch (const sg::Error& error) {
    std::cerr << line.path() << ": " << error.what() << "\n";
    return sg::cli::exit_code(error.kind());
  } catch (const std::bad_alloc&) {
    std::cerr << line.path() << ": out of memory (a smaller graph, or more memory)\n";
    return 3;
  } catch (const std::exception& error) {
    std::cerr << line.path() << ": " << error.what() << "\n";
    return 1;
  }
}
