#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/look/trace.hpp"
#include "graphs/predict/prediction.hpp"
#include "graphs/step/asynchronous.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/commands/simulate_report.hpp"
#include "tools/stepgraph/processes/worlds.hpp"
#include "tools/stepgraph/session/config_options.hpp"
#include "tools/stepgraph/session/measured_device.hpp"
#include "tools/stepgraph/session/plan_text.hpp"
#include "tools/stepgraph/session/session.hpp"
#include "tools/stepgraph/session/targets.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

struct SimulateOptions {
  ConfigOptions config;
  std::optional<std::string> machine, cluster, trace, backend;
  bool calibrate = false, force = false;
};

// What is measured: this machine, with so many threads, and with a device if the config's ranks are on devices.
struct Measured {
  int threads              = 1;
  std::string device       = {};
  std::vector<int> devices = {0};
  std::string disk         = {};  // offload.disk; only without a device
  MakeStorage storage      = {};
};

Measured measured_of(const Config& config) {
  Measured made{.threads = config.threads > 0 ? config.threads : num_cores()};
  if (!has_devices(config)) {
    made.disk    = config.plan.offload.disk;
    made.storage = storage_of(config);
    return made;
  }
  if (config.devices && !config.devices->empty()) made.devices = {config.devices->front()};
  try {
    made.device = device_name(made.devices);
  } catch (const Error& error) {
    throw Error(error.kind(), str("backend ", config.backend, ": no device can be measured here: ", error.what(),
                                  "; --machine FILE uses measurements of another machine, --cluster FILE a "
                                  "description"));
  }
  return made;
}

Calibration measure(const Measured& what, const std::filesystem::path& path, std::string_view why) {
  check_disk_folder(what.disk);
  std::cerr << "stepgraph simulate: measuring "
            << (what.device.empty() ? "this machine" : str(what.device, " and this machine")) << " with "
            << what.threads << (what.threads == 1 ? " thread" : " threads") << ", which takes less than a minute ("
            << why << "): " << path.string() << '\n';
  const std::string_view backend = what.device.empty() ? "loopback" : "cuda";
  CalibrateOptions options{.threads = what.threads, .device = what.device, .disk = what.disk, .storage = what.storage};
  if (!what.device.empty())
    options.tell = [](const std::string& line) { std::cerr << "stepgraph simulate: " << line << '\n'; };
  return calibrate([&](int ranks) { return make_world(backend, ranks, what.devices); }, options);
}

// The calibration of this machine, measured if it is missing.
Calibration own_calibration(const Measured& what) {
  const std::filesystem::path path = calibration_path(what.threads, what.device);
  const bool there                 = std::filesystem::exists(path);
  if (there && !older_than_this_program(path)) {
    Calibration found = load_calibration(path);
    if (found.host == host_name() && found.cores == num_cores() && found.threads == what.threads &&
        found.device == what.device)
      return found;
    throw Error(ErrorKind::config,
                str(path.string(), ": was measured on '", found.host, "' with ", found.threads, " of ", found.cores,
                    " cores, but this is '", host_name(), "' with ", num_cores(), " cores and ", what.threads,
                    " threads (--calibrate to measure again, --machine FILE for another machine)"));
  }
  Calibration made = measure(what, path, there ? "the program is newer than its calibration" : "the first time");
  try {
    save_calibration(made, path);
  } catch (const Error& error) {
    std::cerr << "stepgraph simulate: calibration not saved: " << error.what() << '\n';
  }
  return made;
}

// --calibrate must not replace the file of another machine, or a file that is no calibration.
void check_is_own(const std::filesystem::path& path, bool force) {
  std::error_code error;
  if (force || !std::filesystem::exists(path, error) || std::filesystem::file_size(path, error) == 0) return;
  std::string host;
  try {
    host = load_calibration(path).host;
  } catch (const Error& unreadable) {
    if (has_mark(path, FileKind::calibration)) return;  // damaged, or of another version
    throw Error(ErrorKind::config, str("--calibrate: would replace a file that is no calibration: ", unreadable.what(),
                                       " (another file for --machine, or --force)"));
  }
  if (host == host_name()) return;
  throw Error(ErrorKind::config, str("--calibrate: '", path.string(), "' was measured on '", host, "', but this is '",
                                     host_name(), "' (another file for --machine, or none)"));
}

Calibration calibration_for(const SimulateOptions& options, const Config& config) {
  if (options.calibrate) {
    const Measured what = measured_of(config);
    const std::filesystem::path path =
        options.machine ? std::filesystem::path(*options.machine) : calibration_path(what.threads, what.device);
    if (options.machine) {
      check_is_own(path, options.force);
      check_can_write("--machine", *options.machine);
    }
    Calibration made = measure(what, path, "--calibrate");
    save_calibration(made, path);
    return made;
  }
  if (!options.machine) return own_calibration(measured_of(config));
  Calibration found = load_calibration(*options.machine);
  if (config.threads > 0 && found.threads != config.threads)
    throw Error(ErrorKind::config, str("--machine '", *options.machine, "': was measured with ", found.threads,
                                       " threads, but the run has ", config.threads, " (--threads ", found.threads,
                                       found.host == host_name() ? ", or --calibrate to measure again)" : ")"));
  if (found.host != host_name())
    std::cerr << "stepgraph simulate: uses measurements of another machine, '" << found.host << "'\n";
  return found;
}

void print(const SimulateOptions& options, const Config& config, const StepPrediction& prediction,
           const auto& machine) {
  if (options.trace)
    write_trace({prediction.step.graph, prediction.plan}, prediction.timeline, *options.trace,
                {.title = "simulated step"});
  note_idle_settings("simulate", config, use_of(prediction.step.offload.units));
  print_line(
      plan_text(config, prediction.step, step_size(prediction.step, prediction.plan), {.json = options.config.json}));
  print_prediction(prediction, machine, options.config.json);
}

// That of comm.machine: not that of this machine, which need not be the one that is simulated.
std::optional<MeasuredDevice> described_device(const Config& config) {
  return config.machine.empty() ? std::nullopt : measured_device(config);
}

// None: those of the cluster.
std::optional<OffloadRates> rates_of_machine(const Config& config) {
  const std::optional<MeasuredDevice> device = described_device(config);
  return device ? std::optional(device->rates) : std::nullopt;
}

// On a cluster that a file describes.
void simulate_cluster(const SimulateOptions& options, const Config& config) {
  for (const auto& [name, given] :
       {std::pair("--machine", options.machine.has_value()), std::pair("--calibrate", options.calibrate),
        std::pair("--threads", options.config.threads.has_value())}) {
    if (given)
      throw Error(ErrorKind::config,
                  str("--cluster and ", name, ": a cluster is described, not measured (one of them)"));
  }
  const Cluster cluster                = load_cluster(*options.cluster);
  const std::optional<Machine> chooser = chooser_machine(config);
  const Model model                    = model_of(config);
  const StepPrediction prediction      = [&] {
    try {
      return predict_step(model, config.plan, config.batch, cluster,
                               {.join_tied_first     = joins_tied_first(config),
                                .machine             = pointer_to(chooser),
                                .issue_order         = issue_order_of(config),
                                .workspaces          = workspaces_of(config),
                                .offload_rates       = rates_of_machine(config),
                                .device_memory_bytes = cluster.memory_bytes,
                                .window              = usual_window(model, config.plan, config.batch)});
    } catch (const Error& error) {
      const std::string_view what = error.what();
      const auto is_about         = [&](std::string_view key) { return what.starts_with(key); };
      if (!is_about("cluster: ") && !is_about("rates.") && !is_about("host.") && !is_about("disk.")) throw;
      throw Error(error.kind(), str("--cluster '", *options.cluster, "': ", what));
    }
  }();
  print(options, config, prediction, cluster);
}

// As `train` chooses: by comm.machine, else by the measurements of its GPU, if it has all ranks.
std::optional<OffloadRates> rates_of(const Config& config, const Calibration& calibration,
                                     const std::optional<MeasuredDevice>& described) {
  if (described || calibration.device.empty() || config.backend != "cuda") return offload_rates_of(config, described);
  return offload_rates(calibration);
}

// Disks differ, so the times of one are not those of another.
void note_other_disk(const Config& config, const Calibration& calibration, const StepPrediction& prediction) {
  if (calibration.disk.empty() || prediction.disk_bytes() == 0) return;
  std::error_code failed;  // the folder can be on another machine
  const std::filesystem::path path = std::filesystem::weakly_canonical(config.plan.offload.disk, failed);
  const std::string used           = failed ? config.plan.offload.disk : path.string();
  if (used == calibration.disk) return;
  std::cerr << "stepgraph simulate: the disk was measured in '" << calibration.disk << "', but offload.disk is '"
            << used << "' (--calibrate to measure it there)\n";
}

void simulate_measured(const SimulateOptions& options, const Config& config) {
  const std::optional<Machine> chooser = chooser_machine(config);
  const Model model                    = model_of(config);
  const Calibration calibration        = calibration_for(options, config);
  // With comm.machine, the choices are made for that machine.
  if (config.machine.empty())
    check_host_bytes(config.plan.offload, calibration.host_bytes, str("'", calibration.host, "'"),
                     ranks_of_process(config));
  if (has_devices(config) == calibration.device.empty())
    std::cerr << "stepgraph simulate: backend " << config.backend << ", but times are those of "
              << (calibration.device.empty() ? "a processor" : calibration.device)
              << " (--machine FILE with measurements of the backend)\n";
  if (calibration.threads > calibration.cores)
    std::cerr << "stepgraph simulate: " << calibration.threads << " threads on " << calibration.cores
              << " cores: sharing a core is not simulated\n";
  const std::optional<MeasuredDevice> described = described_device(config);
  const StepPrediction prediction               = predict_step(model, config.plan, config.batch, calibration,
                                                               {.join_tied_first     = joins_tied_first(config),
                                                                .machine             = pointer_to(chooser),
                                                                .simulator           = simulator_of(described),
                                                                .issue_order         = issue_order_of(config),
                                                                .workspaces          = workspaces_of(config),
                                                                .offload_rates       = rates_of(config, calibration, described),
                                                                .device_memory_bytes = calibration.device_bytes,
                                                                .window = usual_window(model, config.plan, config.batch)});
  if (size_bytes(config.plan.precision.param) == 2 && calibration.ops_bf16.empty())
    std::cerr << "stepgraph simulate: ops were measured in fp32; the same times are used for "
              << config.plan.precision.param << '\n';
  note_other_disk(config, calibration, prediction);
  if (!prediction.unmeasured.empty()) {
    std::string names;
    for (const std::string& op : prediction.unmeasured) names += (names.empty() ? "" : ", ") + op;
    std::cerr << "stepgraph simulate: not measured, simulated at average rates: " << names << '\n';
  }
  print(options, config, prediction, calibration);
}

void run_simulate(SimulateOptions options) {
  if (options.backend) options.config.overrides.push_back("backend=" + *options.backend);
  const Config config = read(options.config);
  check_offload_there(config);
  if (options.trace == "-") throw Error(ErrorKind::config, "--trace -: stdout is for the results (a file name)");
  check_target("--trace", options.trace, FileKind::trace, options.force);
  options.cluster ? simulate_cluster(options, config) : simulate_measured(options, config);
}

}  // namespace

void add_simulate(Command program) {
  Command command = program.subcommand(
      "simulate",
      "Predict the time of a training step. The graph that `train` would run is simulated, with measured times of its "
      "ops or on a cluster that is described");
  auto options = std::make_shared<SimulateOptions>();
  add_config_options(command, options->config, true);
  command.option(
      "--machine", options->machine,
      "Calibration file of this or another machine (default: this machine's, in $XDG_CACHE_HOME/stepgraph or "
      "~/.cache/stepgraph, measured if it is missing or older than the program)");
  command.option("--cluster", options->cluster,
                 "Instead of a measured machine: a file that describes a cluster of devices, such as {\"preset\": "
                 "\"a100\", \"nodes\": 4}");
  command.flag("--calibrate", options->calibrate,
               "Measure this machine again first, with backend cuda its GPU too. Takes less than a minute; "
               "the machine should be idle");
  command.option(
      "--backend", options->backend,
      "Instead of the config's: with cuda, the GPU of this machine is measured, or that of --machine is used");
  command.option("--trace", options->trace, "Write the simulated times to this file, for ui.perfetto.dev");
  add_force(command, options->force);
  command.footer(
      "Example: stepgraph simulate run.json --set layout.pp=2 --trace simulated.json\n"
      "         stepgraph simulate run.json --backend cuda --calibrate --machine gpu.json\n"
      "         stepgraph simulate run.json --cluster cluster.json --set precision.param=bf16");
  command.run([options] { run_simulate(*options); });
}

}  // namespace stepgraph::cli
