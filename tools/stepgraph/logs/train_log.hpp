#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tools/stepgraph/logs/record_file.hpp"

namespace stepgraph::cli {

// What logs have of a step and of an evaluation.
struct StepRecord {
  std::int64_t step   = 0;  // from 0
  double loss         = 0;
  double rate         = 0;
  double grad_norm    = 0;
  double tokens_per_s = 0;
  double seconds      = 0;  // since the run began
};
struct EvalRecord {
  std::int64_t step = 0;  // completed steps
  double loss       = 0;
  double seconds    = 0;
};

// The file of `train --log`: a line for each step and for each evaluation. CSV if its name ends with .csv, else JSON
// lines of type "step" and "eval". A line is in the file when add() returns.
//
// A run that begins at step 0 replaces the file. A run that was resumed at step s continues it: whole lines of steps
// before s and of evaluations up to s stay, all others are removed, and `seconds` goes on from the last line that
// stays. The file is replaced at once, so it is never without its lines. Throws Error(backend) with the system's
// reason; another line can be tried afterwards.
class TrainLog {
 public:
  static constexpr std::string_view csv_header = "step,loss,rate,grad_norm,tokens_per_s,seconds,eval_loss\n";

  TrainLog(const std::string& path, std::int64_t first_step);
  void add(const StepRecord& record);
  void add(const EvalRecord& record);

 private:
  std::string path_;
  bool csv_;
  double seconds_before_ = 0;  // of the runs before
  std::optional<RecordFile> file_;
};

}  // namespace stepgraph::cli
