#pragma once
#include <cmath>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "engine/base/error.hpp"
#include "graphs/files/batches.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/processes/together.hpp"
#include "tools/stepgraph/terminal/progress.hpp"
#include "tools/stepgraph/train/lines.hpp"

namespace stepgraph::cli {

class Interrupt;
struct StepLine;
struct TrainParts;

// The steps of a training run, with the evaluations and checkpoints between them. Functions are collective.
class TrainLoop {
 public:
  TrainLoop(TrainParts& parts, const Interrupt& interrupt);

  // Runs steps until the end, a signal or a failure. The weights are then those after state().steps steps.
  void run();
  void save_checkpoint();  // after the steps so far

  [[nodiscard]] const TrainState& state() const noexcept { return state_; }
  [[nodiscard]] double loss() const noexcept { return result_.loss; }  // of the last step; NaN: none
  // Why the run has stopped, if a step, the data or an evaluation has failed.
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  // The last step has made the weights useless, or has not changed them.
  [[nodiscard]] bool is_flawed() const noexcept { return flawed_; }
  // Why --dump-grads could not write.
  [[nodiscard]] const std::optional<Error>& no_gradients() const noexcept { return no_gradients_; }
  // Why the run has stopped early, as all processes have agreed.
  [[nodiscard]] const Stop& stop() const noexcept { return boundary_.stop; }

 private:
  bool next_result();
  std::vector<Batch> read_window();
  Batch read_batch(std::int64_t first_sequence);
  [[nodiscard]] bool agree_to_go_on();
  void run_steps(const std::vector<Batch>& batches);
  [[nodiscard]] std::int64_t position() const;
  void count_tokens();
  void look_at(const std::optional<StepLine>& late);
  void complete_lines();
  void show_progress(std::int64_t step);
  void evaluate();
  void dump_gradients();

  TrainParts& parts_;
  const Interrupt& interrupt_;
  TrainState state_;
  Pace pace_;
  std::int64_t steps_run_ = 0;  // by this process, including a step whose result was not finite
  StepResult result_{.loss = std::nan(""), .grad_norm = std::nan("")};
  std::deque<StepResult> results_;  // of later steps of the same window
  double step_s_ = 0;               // of a step; in a window, the mean
  std::optional<Error> failure_, no_gradients_;
  bool flawed_ = false;
  Boundary boundary_;  // as all processes have agreed
};

}  // namespace stepgraph::cli
