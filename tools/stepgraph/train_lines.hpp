#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "engine/base/error.hpp"
#include "graphs/step/shard_report.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/progress.hpp"

// What `stepgraph train` prints.
namespace stepgraph::cli {

// A run so far.
struct TrainState {
  std::int64_t steps  = 0;
  std::int64_t tokens = 0;
  double seconds      = 0;
};

[[nodiscard]] std::string step_line(std::int64_t step, const StepResult& result, double tokens_per_s,
                                    const TrainState& state, bool json);
[[nodiscard]] std::string summary_line(const TrainState& state, double loss, bool interrupted, bool json);
// The effect of sharding on rank 0.
[[nodiscard]] std::string shard_line(const ShardStats& stats, Shard strategy, bool json);

// Prints lines on stdout, in one process of a job. If the run also writes files, it goes on when stdout cannot be
// written any more: the files are worth more than the lines. Otherwise the run is to stop.
class TrainOutput {
 public:
  TrainOutput(Progress& progress, bool has_files, bool prints)
      : progress_(progress), has_files_(has_files), prints_(prints) {}

  void print(const std::string& line);
  // Why stdout could not be written. None if its reader has gone, as in `stepgraph train ... | head`.
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  [[nodiscard]] bool ends_run() const noexcept { return closed_ && !has_files_; }  // it cannot be written

 private:
  Progress& progress_;
  bool has_files_, prints_;
  bool closed_ = false;
  std::optional<Error> failure_;
};

}  // namespace stepgraph::cli
