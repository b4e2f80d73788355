#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "engine/base/error.hpp"
#include "graphs/predict/offload_report.hpp"
#include "graphs/step/shard_report.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/terminal/progress.hpp"

// What `stepgraph train` prints.
namespace stepgraph::cli {

// A run so far.
struct TrainState {
  std::int64_t steps      = 0;  // in all
  std::int64_t tokens     = 0;  // in all
  std::int64_t first_step = 0;  // of this process: not 0 for a run that was resumed
  std::int64_t new_tokens = 0;  // of this process
  double seconds          = 0;  // of this process
};
struct CheckpointLine {
  std::int64_t step  = 0;  // completed
  std::string path   = {};
  std::int64_t bytes = 0;  // of all files
  double seconds     = 0;  // from the start of the save until it was in place
  double stage_s     = 0;  // of it, the time that the steps waited
  double write_s     = 0;
};

[[nodiscard]] std::string step_line(std::int64_t step, const StepResult& result, double tokens_per_s,
                                    const TrainState& state, bool json);
[[nodiscard]] std::string eval_line(std::int64_t steps, double loss, const TrainState& state, bool json);
[[nodiscard]] std::string checkpoint_line(const CheckpointLine& line, bool json);
[[nodiscard]] std::string resume_line(std::int64_t steps, const std::string& path, bool json);
[[nodiscard]] std::string summary_line(const TrainState& state, double loss, bool interrupted, bool json);
// The effect of sharding on rank 0.
[[nodiscard]] std::string shard_line(const ShardStats& stats, Shard strategy, bool json);

// What offload did in a recorded step.
[[nodiscard]] std::string offload_line(const OffloadFigures& figures, const OffloadPlan& plan,
                                       const std::optional<PredictedStep>& predicted, bool json);

// Prints lines on stdout, in one process of a job. If the run also writes files, it goes on when stdout cannot be
// written any more: the files are worth more than the lines. Otherwise the run is to stop.
class TrainOutput {
 public:
  struct Options {
    bool json      = false;
    bool has_files = false;
    bool prints    = true;  // this is the process that does
  };
  TrainOutput(Progress& progress, const Options& options) : progress_(progress), options_(options) {}

  void print(const std::string& line);
  void print_checkpoint(const CheckpointLine& line) { print(checkpoint_line(line, options_.json)); }
  void print_note(const std::string& line);  // on stderr
  // On stderr, and as a line of JSON.
  void print_failed_checkpoint(std::int64_t steps, const Error& error);
  // Why stdout could not be written. None if its reader has gone, as in `stepgraph train ... | head`.
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  [[nodiscard]] bool ends_run() const noexcept { return closed_ && !options_.has_files; }  // it cannot be written

 private:
  Progress& progress_;
  Options options_;
  bool closed_ = false;
  std::optional<Error> failure_;
};

}  // namespace stepgraph::cli
