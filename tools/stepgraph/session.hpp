#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/run/streams.hpp"
#include "graphs/config/config.hpp"
#include "graphs/files/token_data.hpp"
#include "graphs/models/checkpoint.hpp"
#include "graphs/train/step_run.hpp"

// What commands on a config have in common.
namespace stepgraph::cli {

struct ConfigOptions {
  std::string path;
  std::vector<std::string> overrides;
  std::optional<int> threads;
  bool json = false;
};
// CONFIG, --set and --json; --threads for commands that run.
void add_config_options(CLI::App& command, ConfigOptions& options, bool runs);
[[nodiscard]] Config read(const ConfigOptions& options);

// A model, and the weights that it begins with.
struct Start {
  Model model;
  std::shared_ptr<const Checkpoint> checkpoint;  // null: fresh ones
};
// Of a loaded one, what its config.json says, once that is known to fit the rest of the config.
[[nodiscard]] Model model_of(const Config& config);
[[nodiscard]] Start make_start(const Config& config);
void set_weights(StepRun& run, const Start& start, std::uint64_t seed);

// The steps that data has room for, one after another.
class Batches {
 public:
  // `asked` steps, or as many as there are; refuses more than there are.
  Batches(const Config& config, std::int64_t vocab, std::optional<std::int64_t> asked);

  [[nodiscard]] std::int64_t num_steps() const noexcept { return num_steps_; }
  [[nodiscard]] std::int64_t tokens_per_step() const noexcept { return tokens_per_step_; }
  [[nodiscard]] std::span<const std::int32_t> read(std::int64_t step);  // valid until the next call

 private:
  TokenData data_;
  std::int64_t tokens_per_step_;
  std::int64_t num_steps_;
  std::vector<std::int32_t> tokens_;
};

struct PlanText {
  bool json                                 = false;
  std::string_view step                     = {};       // which one, where there are several: "training"
  std::optional<std::uint64_t> weights_hash = {};       // with which it begins, where ranks were compared
  const StreamPlan* streams                 = nullptr;  // on a device, where they were planned
};
// What is about to run, or was proved: one JSON line of that type, or a few lines of text.
[[nodiscard]] std::string plan_text(const Config& config, const StepGraph& step, const MemoryPlan& plan,
                                    const PlanText& options);

// Refuses a name that no file can have there, before hours of work are lost to it; `what` is the option. A file is made
// beside it and removed again: folders that are full or read-only show only then.
void check_can_write(std::string_view what, const std::optional<std::string>& path);

}  // namespace stepgraph::cli
