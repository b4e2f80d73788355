#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/look/analysis.hpp"
#include "engine/look/op_times.hpp"
#include "engine/look/trace.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/predict/prediction.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/output.hpp"
#include "tools/stepgraph/session.hpp"

namespace stepgraph::cli {
namespace {

struct SimulateOptions {
  ConfigOptions config;
  std::optional<std::string> machine, trace;
  bool calibrate = false;
};

Calibration measure(int threads, const std::filesystem::path& path, std::string_view why) {
  std::cerr << "simulate: measuring this machine with " << threads << (threads == 1 ? " thread" : " threads")
            << ", which takes some seconds (" << why << "): " << path.string() << '\n';
  return calibrate([](int ranks) { return std::make_unique<LoopbackWorld>(ranks); }, {.threads = threads});
}

// Measurements with older kernels are not valid for this program.
bool older_than_this_program(const std::filesystem::path& path) {
  std::error_code error;
  const auto program = std::filesystem::last_write_time("/proc/self/exe", error);
  if (error) return false;
  const auto file = std::filesystem::last_write_time(path, error);
  return !error && file < program;
}

// The calibration of this machine, measured if it is missing.
Calibration own_calibration(int threads) {
  const std::filesystem::path path = calibration_path(threads);
  const bool there                 = std::filesystem::exists(path);
  if (there && !older_than_this_program(path)) {
    Calibration found = load_calibration(path);
    if (found.host == host_name() && found.cores == num_cores() && found.threads == threads) return found;
    throw Error(ErrorKind::config,
                str(path.string(), ": was measured on '", found.host, "' with ", found.threads, " of ", found.cores,
                    " cores, but this is '", host_name(), "' with ", num_cores(), " cores and ", threads,
                    " threads (--calibrate to measure again, --machine FILE for another machine)"));
  }
  Calibration made = measure(threads, path, there ? "the program is newer than its calibration" : "the first time");
  try {
    save_calibration(made, path);
  } catch (const Error& error) {
    std::cerr << "simulate: calibration not saved: " << error.what() << '\n';
  }
  return made;
}

// --calibrate must not overwrite the file of another machine.
void check_is_own(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return;
  std::string host;
  try {
    host = load_calibration(path).host;
  } catch (const Error&) {
    return;  // an unreadable file may be overwritten
  }
  if (host == host_name()) return;
  throw Error(ErrorKind::config, str("--calibrate: '", path.string(), "' was measured on '", host, "', but this is '",
                                     host_name(), "' (another file for --machine, or none)"));
}

Calibration calibration_for(const SimulateOptions& options, const Config& config) {
  const int threads = config.threads > 0 ? config.threads : num_cores();
  if (options.calibrate) {
    const std::filesystem::path path =
        options.machine ? std::filesystem::path(*options.machine) : calibration_path(threads);
    if (options.machine) check_can_write("--machine", options.machine);
    check_is_own(path);
    Calibration made = measure(threads, path, "--calibrate");
    save_calibration(made, path);
    return made;
  }
  if (!options.machine) return own_calibration(threads);
  Calibration found = load_calibration(*options.machine);
  if (config.threads > 0 && found.threads != config.threads)
    throw Error(ErrorKind::config, str("--machine '", *options.machine, "': was measured with ", found.threads,
                                       " threads, but the run has ", config.threads, " (--threads ", found.threads,
                                       found.host == host_name() ? ", or --calibrate to measure again)" : ")"));
  if (found.host != host_name())
    std::cerr << "simulate: uses measurements of another machine, '" << found.host << "'\n";
  return found;
}

struct Figures {
  double busy    = 0;  // share of the step, over all workers
  double overlap = 0;  // of communication, with the same rank's compute
  double bubble  = 0;
};
Figures figures_of(const StepPrediction& prediction, int threads) {
  Figures out{.bubble = pipeline_bubble(prediction.step, prediction.timeline)};
  for (const WorkerBusy& worker : busy_workers(prediction.timeline)) out.busy += worker.share / threads;
  HiddenCommunication all;
  for (const HiddenCommunication& rank : hidden_communication(prediction.step.graph, prediction.timeline)) {
    all.communicate_s += rank.communicate_s;
    all.hidden_s += rank.hidden_s;
  }
  out.overlap = all.share();
  return out;
}

void print_json(const StepPrediction& prediction, const Calibration& calibration) {
  const Figures figures = figures_of(prediction, calibration.threads);
  const auto layout     = prediction.step.layout.spec();
  print_line(json_line({{"type", "simulate"},
                        {"step_s", prediction.makespan_s()},
                        {"tokens_per_s", prediction.tokens_per_s},
                        {"layout", to_string(layout)},
                        {"ranks", layout.num_ranks()},
                        {"threads", calibration.threads},
                        {"host", calibration.host},
                        {"workers_busy", figures.busy},
                        {"overlap", figures.overlap},
                        {"bubble", figures.bubble},
                        {"peak_bytes", prediction.peak_bytes()},
                        {"nodes", prediction.step.graph.num_nodes()},
                        {"unmeasured", prediction.unmeasured}}));
  for (const OpTime& op : op_times(prediction.step.graph, prediction.timeline)) {
    print_line(json_line({{"type", "op"},
                          {"op", op.op},
                          {"nodes", op.num_tasks},
                          {"seconds", op.seconds},
                          {"flops", op.flops},
                          {"bytes_moved", op.bytes_moved}}));
  }
}

void print_text(const StepPrediction& prediction, const Calibration& calibration) {
  const Figures figures = figures_of(prediction, calibration.threads);
  const auto percent    = [](double share) { return str(short_number(100 * share, 3), "%"); };
  print_line(str("simulated step: ", short_number(1e3 * prediction.makespan_s(), 4), " ms, ",
                 short_number(prediction.tokens_per_s), " tokens/s on ", calibration.threads, " of ", calibration.cores,
                 " cores of ", calibration.host, "\nworkers busy ", percent(figures.busy), ", communication hidden ",
                 percent(figures.overlap), "; pipeline bubble ", percent(figures.bubble), " with one device per rank"));
  constexpr std::size_t most = 10;
  const auto ops             = op_times(prediction.step.graph, prediction.timeline);
  double all_s               = 0;
  for (const OpTime& op : ops) all_s += op.seconds;
  for (std::size_t i = 0; i < std::min(most, ops.size()); ++i) {
    std::ostringstream line;
    line << std::right << std::setw(7) << percent(all_s > 0 ? ops[i].seconds / all_s : 0) << "  " << std::left
         << std::setw(38) << ops[i].op << short_number(1e3 * ops[i].seconds, 4) << " ms in " << ops[i].num_tasks
         << (ops[i].num_tasks == 1 ? " node" : " nodes");
    print_line(line.str());
  }
}

void run_simulate(const SimulateOptions& options) {
  const Config config = read(options.config);
  if (options.trace == "-") throw Error(ErrorKind::config, "--trace -: stdout is for the results (a file name)");
  check_can_write("--trace", options.trace);
  if (config.backend != "loopback")
    std::cerr << "simulate: backend " << config.backend << ": GPUs are not simulated; times are those of this "
              << "machine's processor\n";
  const Model model             = model_of(config);
  const Calibration calibration = calibration_for(options, config);
  if (calibration.threads > calibration.cores)
    std::cerr << "simulate: " << calibration.threads << " threads on " << calibration.cores
              << " cores: sharing a core is not simulated\n";
  const StepPrediction prediction = predict_step(model, config.plan, config.batch, calibration);
  if (config.plan.precision.param != DType::f32)
    std::cerr << "simulate: ops were measured in fp32; the same times are used for " << config.plan.precision.param
              << '\n';
  if (!prediction.unmeasured.empty()) {
    std::string names;
    for (const std::string& op : prediction.unmeasured) names += (names.empty() ? "" : ", ") + op;
    std::cerr << "simulate: not measured, simulated at average rates: " << names << '\n';
  }
  if (options.trace)
    write_trace({prediction.step.graph, prediction.plan}, prediction.timeline, *options.trace,
                {.title = "simulated step"});
  print_line(plan_text(config, prediction.step, prediction.plan, {.json = options.config.json}));
  options.config.json ? print_json(prediction, calibration) : print_text(prediction, calibration);
}

}  // namespace

void add_simulate(Command program) {
  Command command = program.subcommand(
      "simulate",
      "Predict the time of a training step without running it: simulates the graph and memory plan that `train` "
      "would run, with measured times of each op");
  auto options = std::make_shared<SimulateOptions>();
  add_config_options(command, options->config, true);
  command.option(
      "--machine", options->machine,
      "Calibration file of this or another machine (default: this machine's, in $XDG_CACHE_HOME/stepgraph or "
      "~/.cache/stepgraph, measured if it is missing or older than the program)");
  command.flag("--calibrate", options->calibrate,
               "Measure this machine again first. Takes some seconds; the machine should be idle");
  command.option("--trace", options->trace, "Write the simulated times to this file, for ui.perfetto.dev");
  command.footer("Example: stepgraph simulate run.json --set layout.pp=2 --trace simulated.json");
  command.run([options] { run_simulate(*options); });
}

}  // namespace stepgraph::cli
