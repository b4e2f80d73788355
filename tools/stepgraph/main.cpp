#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <iostream>
#include <new>

#include "engine/base/error.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/output.hpp"

#if defined(STEPGRAPH_WITH_CUDA)
#include "backends/cuda/devices.hpp"
#endif

namespace {

namespace sg = stepgraph;

std::string version() {
  std::string text = sg::str("stepgraph ", STEPGRAPH_VERSION, "\n");
#if defined(STEPGRAPH_WITH_CUDA)
  text += sg::describe_cuda() + "\n";
#else
  text += "CUDA: not built in (preset `cuda` adds it)\n";
#endif
  return text;
}

// Exit codes: 0 done, 1 failed run or wrong result, 2 bad usage or config, 3 backend failure.
int exit_code(sg::ErrorKind kind) {
  switch (kind) {
    case sg::ErrorKind::config:
      return 2;
    case sg::ErrorKind::graph:
    case sg::ErrorKind::run:
      return 1;
    case sg::ErrorKind::backend:
      return 3;
  }
  return 1;
}

// "stepgraph bench overhead": the subcommands that were reached, for messages.
std::string command_path(const CLI::App& app) {
  std::string path = app.get_name();
  for (const CLI::App* sub : app.get_subcommands()) path += " " + command_path(*sub);
  return path;
}

// What is wrong with the command line; a subcommand that does not exist is named, with those that do.
std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* last = &app;
  while (!last->get_subcommands().empty()) last = last->get_subcommands().back();
  const std::vector<std::string> unknown = last->remaining();
  const bool extra                       = error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError);
  if (unknown.empty() || (error.get_name() != "RequiredError" && !extra)) return error.what();
  const auto is_option = [](const std::string& text) { return text.size() > 1 && text[0] == '-' && text != "--"; };
  if (extra) {
    const auto option = std::find_if(unknown.begin(), unknown.end(), is_option);
    if (option == unknown.end()) return sg::str("unexpected argument '", unknown.front(), "'");
    const bool has_config = last->get_option_no_throw("--set") != nullptr;
    return sg::str("unknown option '", *option, "'",
                   has_config ? " (a key of the config is changed with --set, as in --set layout.dp=2)" : "");
  }
  if (is_option(unknown.front())) return sg::str("unknown option '", unknown.front(), "'");
  std::string known;
  for (const CLI::App* sub : last->get_subcommands([](const CLI::App*) { return true; }))
    known += (known.empty() ? "" : ", ") + sub->get_name();
  return sg::str("unknown subcommand '", unknown.front(), "' (known: ", known, ")");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Stepgraph: training steps as task graphs, proved before they run.", "stepgraph");
  app.footer("Example: stepgraph train run.json --steps 100");
  app.require_subcommand(1);
  app.failure_message([](const CLI::App*, const CLI::Error& error) { return std::string(error.what()); });
  bool show_version = false;
  app.add_flag_callback(
      "--version",
      [&] {
        show_version = true;
        throw CLI::Success();
      },
      "Print the version and what was built in");
  sg::cli::add_train(app);
  sg::cli::add_eval(app);
  sg::cli::add_generate(app);
  sg::cli::add_graph(app);
  sg::cli::add_verify(app);
  sg::cli::add_plan_memory(app);
  sg::cli::add_simulate(app);
  sg::cli::add_schedule(app);
  sg::cli::add_bench(app);
  sg::cli::ignore_broken_pipes();

  try {
    app.parse(argc, argv);
    sg::cli::flush_output();
    return 0;
  } catch (const sg::cli::OutputClosed&) {
    return 0;
  } catch (const CLI::Success& done) {
    if (show_version) {
      std::cout << version();
      return 0;
    }
    return app.exit(done, std::cout, std::cerr);
  } catch (const CLI::ParseError& error) {
    const std::string path = command_path(app);
    std::cerr << path << ": " << explain(app, error) << " (see " << path << " --help)\n";
    return 2;
  } catch (const sg::Error& error) {
    std::cerr << command_path(app) << ": " << error.what() << "\n";
    return exit_code(error.kind());
  } catch (const std::bad_alloc&) {
    std::cerr << command_path(app) << ": out of memory (a smaller graph, or a machine with more)\n";
    return 3;
  } catch (const std::exception& error) {
    std::cerr << command_path(app) << ": " << error.what() << "\n";
    return 1;
  }
}
