#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "graphs/files/batches.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/plan/memory_preset.hpp"
#include "graphs/plan/plan.hpp"

namespace stepgraph {

// A Hugging Face folder: config.json and model.safetensors.
struct LoadFrom {
  std::string folder                                       = {};
  double dropout                                           = 0;  // the dropout in its config.json is ignored
  friend bool operator==(const LoadFrom&, const LoadFrom&) = default;
};

// A fresh model, or a saved one.
using ModelSource = std::variant<Gpt2Spec, LlamaSpec, MlpSpec, LoadFrom>;

// The place of this process in a job of several (backends gloo, mpi and nccl). It replaces what the environment says.
struct WorldSpec {
  int rank                                                   = -1;  // -1: as the environment says
  int size                                                   = 0;   // processes of the job; 0: as the environment says
  std::string address                                        = {};  // of process 0: HOST or HOST:PORT; empty: likewise
  friend bool operator==(const WorldSpec&, const WorldSpec&) = default;
};

// Checkpoints of a run: weights, optimizer state and position in the data. One is also written at the end of the run.
struct CheckpointPlan {
  std::string folder                                                   = {};    // empty: no checkpoints
  std::int64_t every                                                   = 0;     // steps; 0: not by steps
  double every_s                                                       = 0;     // seconds; 0: not by time
  int keep                                                             = 2;     // the newest that stay; 0: all
  bool async                                                           = true;  // written while steps go on
  friend bool operator==(const CheckpointPlan&, const CheckpointPlan&) = default;
};

// Validation during training.
struct EvalPlan {
  std::optional<DataSpec> data                             = {};  // none: the share data.validation of the run's data
  std::int64_t every                                       = 0;   // steps; 0: no validation
  std::int64_t steps                                       = 10;  // batches, or all if there are fewer
  friend bool operator==(const EvalPlan&, const EvalPlan&) = default;
};

// A run, as one JSON file describes it. Only `model`, `data` and `batch` are required; other keys default to the values
// in these structs.
//
// The parser checks everything that it can check without opening another file: all keys are known, all numbers are in
// range, and model, batch and layout fit each other. Loaded models, token files and schedule files are checked when
// they are read. File names are relative to the current folder.
struct Config {
  ModelSource model         = Gpt2Spec{};
  DataSpec data             = {};
  BatchSpec batch           = {.global = 8, .micro = 2, .seq = 128};
  Plan plan                 = {};
  MemoryPreset preset       = MemoryPreset::basic;  // sets those parts of the plan that have no key in the config
  int timeout_ms            = 30'000;               // a step fails if no node ends for so long
  bool exact                = false;                // NCCL too adds in rank order: the bits of other backends on GPUs
  Algorithm nccl_algorithm  = Algorithm::direct;    // that NCCL is told to use; that of the plan is direct then
  std::string machine       = {};  // a file with the machine that `adaptive` chooses for; empty: a usual one
  WorldSpec world           = {};
  CheckpointPlan checkpoint = {};
  EvalPlan eval             = {};
  std::uint64_t seed        = 0;  // of fresh weights, dropout and the shuffle of data
  int threads               = 0;  // 0: all cores
  std::string backend       = "loopback";
  // The GPUs of the ranks of this process, in the order of the ranks; an empty list: all that are visible. None: as the
  // backend has it: [0] for cuda, all for nccl. Only for backends on GPUs.
  std::optional<std::vector<int>> devices = {};

  friend bool operator==(const Config&, const Config&) = default;
};

// Whether each rank of the backend has a process of its own.
[[nodiscard]] bool has_processes(std::string_view backend) noexcept;

// Reads a config after `path=value` overrides, in order: "layout.dp=2", "optimizer.kind=sgd", or a whole section,
// "data={\"synthetic\": 1}". A value that is not JSON is a string; missing objects are created. Throws Error(config):
// "layout.tp: what is wrong (what would be right)", with a suggestion for a mistyped key, or "line 3, column 7: ..."
// for text that is not JSON.
[[nodiscard]] Config parse_config(std::string_view text, std::span<const std::string> overrides = {});
[[nodiscard]] Config read_config(const std::string& path, std::span<const std::string> overrides = {});

// The checks of read_config that need the model, for a model that was loaded from a folder: does it fit batch and
// layout? Throws Error(config) that names the key.
void check_fit(const Config& config, const Model& model);

// All values on one line. parse_config reads back an equal config.
[[nodiscard]] std::string to_json(const Config& config);

}  // namespace stepgraph
