#include "tools/stepgraph/session/session.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <utility>

#include "backends/nccl/calls.hpp"
#include "backends/process/environment.hpp"
#include "backends/storage/spill_file.hpp"
#include "engine/base/error.hpp"
#include "engine/base/output_folder.hpp"
#include "engine/base/words.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/models/huggingface.hpp"
#include "graphs/predict/calibration.hpp"
#include "graphs/predict/machine_file.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/processes/worlds.hpp"
#include "tools/stepgraph/session/targets.hpp"

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

// use(the file of comm.machine). Errors name the key.
template <class Use>
auto with_machine_file(const Config& config, const Use& use) {
  try {
    return use(load_machine_file(config.machine));
  } catch (const Error& error) {
    throw Error(error.kind(), str("comm.machine: ", error.what()));
  }
}

// The ranks of a config that this machine holds.
int ranks_here(const Config& config) {
  if (!has_processes(config.backend)) return ranks_of_process(config);
  PlaceOverrides given = place_of(config.world);
  given.needs_address  = false;
  try {
    return find_place(process_environment(), given).local_size;
  } catch (const Error&) {  // the set-up of the world says what is wrong
    return 1;
  }
}

}  // namespace

int ranks_of_process(const Config& config) {
  return has_processes(config.backend) ? 1 : Layout(config.plan.layout).num_ranks();
}

void check_offload_here(const Config& config) {
  const OffloadPlan& offload = config.plan.offload;
  check_disk_folder(offload.disk);
  if (offload.host_bytes > 0) check_host_bytes(offload, machine_memory_bytes(), "this machine", ranks_here(config));
}

void check_offload_there(const Config& config) {
  const OffloadPlan& offload = config.plan.offload;
  if (offload.host_bytes == 0 || config.machine.empty()) return;
  const MachineFile file = with_machine_file(config, std::identity{});
  if (const auto* const measured = std::get_if<Calibration>(&file))
    check_host_bytes(offload, measured->host_bytes, str("'", measured->host, "'"), ranks_of_process(config));
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
  return with_machine_file(config, [&](const MachineFile& file) {
    return machine_of(file, Layout(config.plan.layout).num_ranks(), config.plan.precision.param);
  });
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

}  // namespace stepgraph::cli
