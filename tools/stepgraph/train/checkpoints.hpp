#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "graphs/config/config.hpp"
#include "graphs/train/checkpoint.hpp"
#include "tools/stepgraph/train/lines.hpp"

namespace stepgraph::cli {

// The checkpoints that a training run writes, as the section `checkpoint` says. One that cannot be written does not end
// the run: it is reported at once, and the next one is tried. Without checkpoint.folder nothing happens. Use it between
// steps; functions are collective unless said otherwise.
class TrainCheckpoints {
 public:
  // `loaded`: the checkpoint that the run goes on from, with `steps` steps. Empty: none.
  TrainCheckpoints(Trainer& trainer, const Config& config, TrainOutput& output, std::int64_t steps,
                   const std::string& loaded);

  // Not collective. The first is by this process's clock: process 0 decides for all.
  [[nodiscard]] bool is_due_by_time() const;
  [[nodiscard]] bool is_due_after(std::int64_t steps) const;
  [[nodiscard]] bool is_written() const;  // one is under way, and the files of this process are written

  // Begins a checkpoint after `steps` steps, unless the last one has as many and is in place. One that is under way is
  // finished first.
  void save(std::int64_t steps, std::int64_t position, const std::string& config);
  void finish();  // waits for the one under way

  // Why the last one could not be written.
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  // The last one that is in place, of this run. Empty: none.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  using Clock = std::chrono::steady_clock;
  void fail(const Error& error);

  const CheckpointPlan& plan_;
  TrainOutput& output_;
  std::optional<CheckpointWriter> writer_;
  Clock::time_point last_save_ = Clock::now();
  std::int64_t last_steps_;  // of the last one that was begun, or gone on from
  bool under_way_    = false;
  bool said_no_copy_ = false;
  bool has_written_  = false;
  std::optional<Error> failure_;
  std::string path_;
};

}  // namespace stepgraph::cli
