#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/train/lines.hpp"

namespace stepgraph::cli {

class TrainRecords;

// Of one step.
struct StepLine {
  std::int64_t step = 0;
  StepResult result;
  double tokens_per_s = 0;
  TrainState state;
};

// The lines of steps, on stdout and in log files. With stale updates the norm of a step is known after the next step:
// until then its line waits.
class StepLines {
 public:
  struct Options {
    std::int64_t every = 1;  // only the lines of every so many steps are printed, and the last line; 0: only that one
    bool json          = false;
  };
  // `records`: the log files, or null.
  StepLines(TrainOutput& output, TrainRecords* records, const Options& options)
      : output_(output), records_(records), options_(options) {}

  // If the line of the step before has waited: it is printed, and returned.
  std::optional<StepLine> add(const StepLine& line);
  // Prints the line that waits, and returns it.
  StepLine complete(double norm);
  [[nodiscard]] bool one_waits() const noexcept { return late_.has_value(); }
  // The line of the last step, if it was not printed.
  void print_last();
  // The last norm that was known late; NaN: none.
  [[nodiscard]] double late_norm() const noexcept { return late_norm_; }

 private:
  void print(const StepLine& line);

  TrainOutput& output_;
  TrainRecords* records_;
  Options options_;
  std::string last_line_;         // that was not printed
  std::optional<StepLine> late_;  // waits for its norm
  double late_norm_ = std::nan("");
};

}  // namespace stepgraph::cli
