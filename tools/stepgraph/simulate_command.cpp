#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/look/analysis.hpp"
#include "engine/look/op_times.hpp"
#include "engine/look/trace.hpp"
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

// What was measured with other kernels says nothing about these.
bool older_than_this_program(const std::filesystem::path& path) {
  std::error_code error;
  const auto program = std::filesystem::last_write_time("/proc/self/exe", error);
  if (error) return false;
  const auto file = std::filesystem::last_write_time(path, error);
  return !error && file < program;
}

// This machine's own, made where it is missing.
Calibration own_calibration(int threads) {
  const std::filesystem::path path = calibration_path(threads);
  const bool there                 = std::filesystem::exists(path);
  if (there && !older_than_this_program(path)) {
    Calibration found = load_calibration(path);
    if (found.host == host_name() && found.cores == num_cores() && found.threads == threads) return found;
    throw Error(ErrorKind::config,
                str(path.string(), ": was measured on '", found.host, "' with ", found.threads, " of ", found.cores,
                    " cores; this is '", host_name(), "' with ", num_cores(), ", and ", threads,
                    " threads are asked for (--calibrate measures anew, --machine takes another machine's file)"));
  }
  Calibration made = measure(threads, path, there ? "the program is newer than what it measured" : "the first time");
  try {
    save_calibration(made, path);
  } catch (const Error& error) {
    std::cerr << "simulate: not kept: " << error.what() << '\n';
  }
  return made;
}

// What was measured on another machine cannot be measured again here.
void check_is_own(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return;
  std::string host;
  try {
    host = load_calibration(path).host;
  } catch (const Error&) {
    return;  // of no use to anybody
  }
  if (host == host_name()) return;
  throw Error(ErrorKind::config, str("--calibrate: '", path.string(), "' was measured on '", host, "', this is '",
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
                                       " threads, the run has ", config.threads, " (--threads ", found.threads,
                                       found.host == host_name() ? ", or --calibrate to measure anew)" : ")"));
  if (found.host != host_name())
    std::cerr << "simulate: as measured on '" << found.host << "', which is not this machine\n";
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
  print_line(nlohmann::ordered_json{{"type", "simulate"},
                                    {"step_s", prediction.step_s()},
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
                                    {"unmeasured", prediction.unmeasured}}
                 .dump());
  for (const OpTime& op : op_times(prediction.step.graph, prediction.timeline)) {
    print_line(nlohmann::ordered_json{{"type", "op"},
                                      {"op", op.op},
                                      {"nodes", op.num_tasks},
                                      {"seconds", op.seconds},
                                      {"flops", op.flops},
                                      {"bytes_moved", op.bytes_moved}}
                   .dump());
  }
}

void print_text(const StepPrediction& prediction, const Calibration& calibration) {
  const Figures figures = figures_of(prediction, calibration.threads);
  const auto percent    = [](double share) { return str(short_number(100 * share, 3), "%"); };
  print_line(str("simulated step: ", short_number(1e3 * prediction.step_s(), 4), " ms, ",
                 short_number(prediction.tokens_per_s), " tokens/s on ", calibration.threads, " of ", calibration.cores,
                 " cores of ", calibration.host, "\nworkers busy ", percent(figures.busy), ", communication hidden ",
                 percent(figures.overlap), "; pipeline bubble ", percent(figures.bubble),
                 " with a device for each rank"));
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
  if (options.trace == "-") throw Error(ErrorKind::config, "--trace -: stdout has the figures (the name of a file)");
  check_can_write("--trace", options.trace);
  if (config.backend != "loopback")
    std::cerr << "simulate: backend " << config.backend << ": ops are taken to last as long as on this machine's "
              << "processor; of a GPU nothing is measured\n";
  const Model model             = model_of(config);
  const Calibration calibration = calibration_for(options, config);
  if (calibration.threads > calibration.cores)
    std::cerr << "simulate: " << calibration.threads << " threads on " << calibration.cores
              << " cores: that they share them is not simulated\n";
  const StepPrediction prediction = predict_step(model, config.plan, config.batch, calibration);
  if (config.plan.precision.param != DType::f32)
    std::cerr << "simulate: ops were measured in fp32 and are taken to last as long in " << config.plan.precision.param
              << '\n';
  if (!prediction.unmeasured.empty()) {
    std::string names;
    for (const std::string& op : prediction.unmeasured) names += (names.empty() ? "" : ", ") + op;
    std::cerr << "simulate: not measured, so taken at the usual rates: " << names << '\n';
  }
  if (options.trace)
    write_trace({prediction.step.graph, prediction.plan}, prediction.timeline, *options.trace,
                {.title = "simulated step"});
  print_line(plan_text(config, prediction.step, prediction.plan, {.json = options.config.json}));
  options.config.json ? print_json(prediction, calibration) : print_text(prediction, calibration);
}

}  // namespace

void add_simulate(CLI::App& app) {
  CLI::App* command = app.add_subcommand("simulate",
                                         "Predict how long a training step takes, without running it: the graph and "
                                         "plan that `train` would run, with what "
                                         "each op takes on a machine that was measured");
  auto options      = std::make_shared<SimulateOptions>();
  add_config_options(*command, options->config, true);
  command->add_option(
      "--machine", options->machine,
      "What was measured, on this or another machine (default: this one's, in $XDG_CACHE_HOME/stepgraph "
      "or ~/.cache/stepgraph, measured when it is missing or older than the program)");
  command->add_flag("--calibrate", options->calibrate,
                    "Measure this machine first, anew: some seconds, in which it should have nothing else to do");
  command->add_option("--trace", options->trace, "A file for the simulated times (see ui.perfetto.dev)");
  command->footer("Example: stepgraph simulate run.json --set layout.pp=2 --trace simulated.json");
  command->callback([options] { run_simulate(*options); });
}

}  // namespace stepgraph::cli
