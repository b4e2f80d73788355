#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graphs/config/config.hpp"
#include "graphs/files/batches.hpp"
#include "graphs/models/model_folder.hpp"
#include "graphs/train/step_run.hpp"

// What commands make from a config: models, weights, batches, and what its backend needs.
namespace stepgraph::cli {

// For commands that run steps. Throws Error(config) if offload.host_bytes of the ranks that are on this machine is
// above its memory, or offload.disk is not a folder here.
void check_offload_here(const Config& config);
// For commands that can plan for another machine. Throws Error(config) if offload.host_bytes is above the memory of the
// one that comm.machine was measured on, if its file says how much that has.
void check_offload_there(const Config& config);
// The ranks that one process holds: all of them; 1 with gloo, mpi and nccl.
[[nodiscard]] int ranks_of_process(const Config& config);

// A model and its first weights.
struct Start {
  Model model;
  std::shared_ptr<const ModelFolder> folder;  // null: fresh weights
};
// The model of a config. A loaded model is described by its config.json, which is checked against the rest of the
// config. Notes about it are printed to stderr if `prints`: of several processes, one does.
[[nodiscard]] Model model_of(const Config& config, bool prints = true);
[[nodiscard]] Start make_start(const Config& config, bool prints);
// The machine for which `adaptive` chooses algorithms: that of comm.machine. None if the key is not set: the step then
// uses a default machine.
[[nodiscard]] std::optional<Machine> chooser_machine(const Config& config);
[[nodiscard]] inline const Machine* pointer_to(const std::optional<Machine>& machine) {
  return machine ? &*machine : nullptr;
}
// What the config's backend needs, for commands that plan a step without a world: the order of communications, the
// workspaces of streams, and both with the config's reuse.
[[nodiscard]] IssueOrder issue_order_of(const Config& config);
[[nodiscard]] WorkspaceNeeds workspaces_of(const Config& config);
[[nodiscard]] bool joins_tied_first(const Config& config);  // StepOptions::join_tied_first
[[nodiscard]] MemoryPlanOptions planning_of(const Config& config);
// With update.mode asynchronous: a window that has gates, for commands that draw or prove it; else 1.
[[nodiscard]] int shown_window(const Config& config);
// Spill files in offload.disk; empty where the config has none.
[[nodiscard]] MakeStorage storage_of(const Config& config);
void set_weights(StepRun& run, const Start& start, std::uint64_t seed);

// comm.timeout_ms where this process has all ranks: how long a step may go on without any node that ends. In a world of
// several processes the world itself watches for that.
[[nodiscard]] std::chrono::milliseconds stall_timeout(const Config& config, World& world);

// The batches of a config's data.
[[nodiscard]] Batches make_batches(const Config& config, std::int64_t vocab);
// Those of eval.data; without it, those of the share data.validation. The last batch may then have fewer sequences: the
// missing ones do not count. Without both, whole batches of all of the data.
[[nodiscard]] Batches validation_batches(const Config& config, std::int64_t vocab);
// A run that goes on: the steps that it has done, and the sequences that it has read.
struct Done {
  std::int64_t steps     = 0;
  std::int64_t sequences = 0;
};
// The number of steps in all: `asked`, or all that the data has. Throws Error(config) if the data has fewer.
[[nodiscard]] std::int64_t choose_steps(const Batches& batches, std::optional<std::int64_t> asked,
                                        const Done& done = {});

}  // namespace stepgraph::cli
