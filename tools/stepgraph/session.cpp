#include "tools/stepgraph/session.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <iostream>

#include "backends/nccl/calls.hpp"
#include "backends/storage/spill_file.hpp"
#include "engine/base/error.hpp"
#include "engine/base/output_folder.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/models/huggingface.hpp"
#include "graphs/predict/calibration.hpp"
#include "graphs/predict/machine_file.hpp"
#include "graphs/train/trainer.hpp"
#include "ops/hash.hpp"
#include "tools/stepgraph/output.hpp"
#include "tools/stepgraph/targets.hpp"

namespace stepgraph::cli {
namespace {

std::string name_list(const std::vector<std::string>& names) {
  return join_text(names, ", ", [](const std::string& name) { return name; });
}

Model load_named(const LoadFrom& from) {
  try {
    return load_model(from.folder, from.dropout);
  } catch (const Error& error) {
    const std::vector<std::string> left = interrupted_folders(from.folder);
    throw Error(error.kind(), str("model.load: ", error.what(),
                                  holds_checkpoints(from.folder) ? "; the folder holds checkpoints (a model that "
                                                                   "`stepgraph export` writes from them)"
                                                                 : "",
                                  left.empty() ? "" : str("; an interrupted save left ", name_list(left))));
  }
}

// A folder that another process replaces gets a new number.
std::pair<dev_t, ino_t> number_of(const std::string& folder) {
  struct stat status {};
  return ::stat(folder.c_str(), &status) == 0 ? std::pair(status.st_dev, status.st_ino) : std::pair<dev_t, ino_t>();
}

template <class Number>
std::string count(Number number, std::string_view one, std::string_view more) {
  return str(number, " ", number == 1 ? one : more);
}

MachineFile machine_file(const Config& config) {
  try {
    return load_machine_file(config.machine);
  } catch (const Error& error) {
    throw Error(error.kind(), str("comm.machine: ", error.what()));
  }
}

std::string streams_text(const StreamPlan& plan) {
  return str("\non devices: ", count(plan.num_streams(), "stream", "streams"), ", ",
             count(plan.num_events(), "event", "events"), "; ", count(plan.waits.size(), "wait", "waits"),
             " in a step, ", plan.loop_waits.size(), " for the step before");
}

}  // namespace

void add_config_options(Command command, ConfigOptions& options, bool runs) {
  command.option("CONFIG", options.path, "The config, a JSON file; file names in it are relative to the current folder")
      .required();
  command.repeated(
      "--set", options.overrides,
      "path=value: change a key of the config, as in layout.dp=2 or 'data={\"text\": \"FILE\"}'. A value that is "
      "not JSON is a string. May be repeated");
  if (runs)
    command.option("--threads", options.threads, "Compute threads, instead of the config's; 0 uses all cores")
        .between(0, 1024);
  command.flag("--json", options.json, "Print JSON lines and nothing else");
}

void add_devices_option(Command command, std::optional<std::string>& devices) {
  command.option(
      "--devices", devices,
      "With backend cuda: the GPUs of the ranks, as in 0,1, or all (default: the config's, or 0). With nccl: those of "
      "the processes of this machine (default: all); 0,0 lets two processes share one");
}

std::vector<int> parse_devices(std::string_view text) {
  std::vector<int> devices;
  if (text == "all") return devices;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end       = std::min(text.find(',', begin), text.size());
    const std::string_view item = text.substr(begin, end - begin);
    int number                  = -1;
    const auto [stop, error]    = std::from_chars(item.data(), item.data() + item.size(), number);
    if (error != std::errc{} || stop != item.data() + item.size() || number < 0)
      throw Error(ErrorKind::config, str("--devices: '", text, "' is no list of devices (as in 0,1; or all)"));
    devices.push_back(number);
    begin = end + 1;
  }
  return devices;
}

Config read(const ConfigOptions& options) {
  std::vector<std::string> overrides = options.overrides;
  if (options.devices) {
    const std::vector<int> devices = parse_devices(*options.devices);
    overrides.push_back(devices.empty() ? "devices=all"
                                        : str("devices=[", join_text(devices, ",", [](int d) { return str(d); }), "]"));
  }
  Config config = read_config(options.path, overrides);
  if (options.threads) config.threads = *options.threads;
  return config;
}

void check_host_memory(const Config& config, bool runs) {
  const OffloadPlan& offload = config.plan.offload;
  if (offload.host_bytes == 0) return;
  if (runs) return check_host_bytes(offload, machine_memory_bytes());
  if (config.machine.empty()) return;
  const MachineFile file = machine_file(config);
  if (const auto* const measured = std::get_if<Calibration>(&file))
    check_host_bytes(offload, measured->host_bytes, str("'", measured->host, "'"));
}

void warn_about_threads(int threads) {
  if (threads > num_cores())
    std::cerr << str("stepgraph: ", threads, " threads are more than the ", num_cores(),
                     num_cores() == 1 ? " core" : " cores", " of this machine (", num_cores(), " uses all of them)\n");
}

Model model_of(const Config& config, bool prints) {
  return std::visit(
      [&](const auto& from) {
        if constexpr (std::is_same_v<std::decay_t<decltype(from)>, LoadFrom>) {
          Model model = load_named(from);
          check_fit(config, model);
          if (prints) {
            for (const std::string& note : model.notes) std::cerr << from.folder << "/config.json: " << note << '\n';
          }
          return model;
        } else {
          return make_model(from);
        }
      },
      config.model);
}

Start make_start(const Config& config, bool prints) {
  const auto* from = std::get_if<LoadFrom>(&config.model);
  if (from == nullptr) return {.model = model_of(config, prints), .folder = {}};
  for (;;) {
    const auto before = number_of(from->folder);
    Start start{.model = model_of(config, prints), .folder = std::make_shared<const ModelFolder>(from->folder)};
    // Model and weights must be those of one save.
    if (number_of(from->folder) != before) continue;
    check_tensors(*start.folder, start.model.parameters().parameters());
    return start;
  }
}

std::optional<Machine> chooser_machine(const Config& config) {
  if (config.machine.empty()) return std::nullopt;
  try {
    return machine_of(load_machine_file(config.machine), Layout(config.plan.layout).num_ranks(),
                      config.plan.precision.param);
  } catch (const Error& error) {
    throw Error(error.kind(), str("comm.machine: ", error.what()));
  }
}

IssueOrder issue_order_of(const Config& config) {
  return config.backend == "nccl" ? IssueOrder::per_rank : IssueOrder::any;
}

WorkspaceNeeds workspaces_of(const Config& config) {
  if (config.backend == "cuda") return {.bodies = true};
  if (config.backend != "nccl") return {};
  return {.bodies = true, .part = [calls = nccl::CallOptions{.exact = config.exact}](const Graph& graph, Node part) {
            return nccl::workspace_bytes(graph, part, calls);
          }};
}

bool joins_tied_first(const Config& config) { return config.backend == "nccl" && !config.exact; }

MemoryPlanOptions planning_of(const Config& config) {
  return {.reuse = config.plan.reuse, .issue_order = issue_order_of(config), .workspaces = workspaces_of(config)};
}

int shown_window(const Config& config) {
  const UpdatePlan& update = config.plan.update;
  return update.mode == UpdateWhen::asynchronous ? std::min(update.max_staleness + 2, 16) : 1;
}

MakeStorage storage_of(const Config& config) {
  return config.plan.offload.disk.empty() ? MakeStorage{} : spill_files(config.plan.offload.disk);
}

void set_weights(StepRun& run, const Start& start, std::uint64_t seed) {
  start.folder ? stepgraph::set_weights(run, *start.folder) : set_fresh_weights(run, seed);
}

std::chrono::milliseconds stall_timeout(const Config& config, World& world) {
  return std::chrono::milliseconds(world.peers() == nullptr ? config.timeout_ms : 0);
}

Batches make_batches(const Config& config, std::int64_t vocab) {
  return Batches(config.data, vocab, {.global = config.batch.global, .seq = config.batch.seq, .seed = config.seed});
}

Batches validation_batches(const Config& config, std::int64_t vocab) {
  DataSpec data        = config.eval.data.value_or(config.data);
  data.epochs          = DataSpec{}.epochs;  // one epoch in file order
  data.shuffle         = false;
  const bool has_share = data.validation > 0;
  return Batches(data, vocab,
                 {.global = config.batch.global,
                  .seq    = config.batch.seq,
                  .part   = has_share ? DataPart::validation : DataPart::training,
                  .pads   = has_share || config.eval.data.has_value()});
}

std::int64_t choose_steps(const Batches& batches, std::optional<std::int64_t> asked, const Done& done) {
  if (!batches.num_steps()) {
    if (!asked)
      throw Error(ErrorKind::config,
                  str("--steps: missing (", batches.num_sequences() ? "with data.epochs 0 the" : "synthetic",
                      " data has no end)"));
    return *asked;
  }
  const std::int64_t there = done.steps + *batches.num_steps(done.sequences);
  if (asked && *asked > there) {
    const std::int64_t epochs = batches.spec().epochs;
    const std::string more    = epochs > 1 ? str(" in each of ", epochs, " epochs") : "";
    throw Error(ErrorKind::config,
                str("--steps ", *asked, ": the data has ", *batches.data().num_tokens(), " tokens", more,
                    ", enough for ", there, " steps", done.steps > 0 ? str(", ", done.steps, " of them done,") : "",
                    " of ", batches.tokens_per_step(), " and one more token (at most ", there, "; or data.epochs)"));
  }
  return asked.value_or(there);
}

JsonValue activations_json(const ActivationCounts& layers) {
  return {{"offloaded", layers.offloaded}, {"recomputed", layers.recomputed}, {"kept", layers.kept}};
}

std::string plan_text(const Config& config, const StepGraph& step, const StepSize& size, const PlanText& options) {
  const std::vector<std::int64_t>& peaks = size.peak_bytes;
  const std::int64_t num_parameters      = step.model.parameters().num_elements();
  const auto activations                 = step.activations();
  if (options.json) {
    JsonValue line = {{"type", "plan"}};
    if (!options.step.empty()) line.set("step", options.step);
    if (!step.window.empty()) line.set("window", step.window.size());
    line.add({{"model", step.model.kind},
              {"parameters", num_parameters},
              {"layout", to_string(step.layout.spec())},
              {"ranks", step.layout.num_ranks()},
              {"schedule", config.plan.pipeline.schedule},
              {"stages", step.schedule.num_stages()},
              {"layers", step.layers},
              {"microbatches", step.num_microbatches},
              {"nodes", size.nodes},
              {"edges", size.edges},
              {"reuse_edges", size.reuse_edges},
              {"peak_bytes", peaks},
              {"host_bytes", size.host_bytes},
              {"disk_bytes", size.disk_bytes}});
    if (activations) line.set("activation_layers", activations_json(*activations));
    if (options.streams != nullptr)
      line.add({{"streams", options.streams->num_streams()},
                {"events", options.streams->num_events()},
                {"event_waits", options.streams->waits.size()},
                {"loop_waits", options.streams->loop_waits.size()}});
    if (options.weights_hash) line.set("weights_hash", hash_text(*options.weights_hash));
    return json_line(line);
  }
  const auto most_of = [](const std::vector<std::int64_t>& bytes) {
    const double mib = static_cast<double>(*std::max_element(bytes.begin(), bytes.end())) / (1 << 20);
    return mib < 1024 ? str(short_number(mib, 3), " MiB") : str(short_number(mib / 1024, 3), " GiB");
  };
  const bool uneven = std::ranges::adjacent_find(step.layers, std::not_equal_to{}) != step.layers.end();
  const auto beside = [&](const std::vector<std::int64_t>& bytes, std::string_view where) {
    const bool none = std::all_of(bytes.begin(), bytes.end(), [](std::int64_t one) { return one == 0; });
    return none ? std::string() : str(", ", most_of(bytes), " ", where);
  };
  return str(
      options.step, options.step.empty() ? "" : " step:\n", step.model.kind, ": ",
      count(step.model.layers, "layer", "layers"), ", width ", step.model.width, ", ", num_parameters, " parameters; ",
      count(step.layout.num_ranks(), "rank", "ranks"), " (", to_string(step.layout.spec()), "), ",
      config.plan.pipeline.schedule, " over ", count(step.schedule.num_stages(), "stage", "stages"),
      uneven ? str(" (", join_text(step.layers, ", ", [](int layers) { return str(layers); }), " layers)") : "",
      " and ", count(step.num_microbatches, "microbatch", "microbatches"),
      step.window.size() > 1 ? str("\nwindow of ", step.window.size(), " steps: ") : "\nstep: ", size.nodes, " nodes, ",
      size.edges, " edges; at most ", most_of(peaks), " on a rank", beside(size.host_bytes, "in its host memory"),
      beside(size.disk_bytes, "on its disk"), activations ? str("\nactivations: ", to_text(*activations)) : "",
      options.streams != nullptr ? streams_text(*options.streams) : "",
      options.weights_hash
          ? str("\nweights: ", hash_text(*options.weights_hash), ", equal on all data-parallel ranks that hold them")
          : "");
}

}  // namespace stepgraph::cli
