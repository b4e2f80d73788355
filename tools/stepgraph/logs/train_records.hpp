#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "engine/base/error.hpp"
#include "tools/stepgraph/logs/tensorboard.hpp"
#include "tools/stepgraph/logs/train_log.hpp"
#include "tools/stepgraph/terminal/progress.hpp"

namespace stepgraph::cli {

// The log files of a training run: --log and --tensorboard. A record that cannot be written never ends the run: the
// first such error is printed at once, the following records are tried, and failure() is for the end of the run.
class TrainRecords {
 public:
  struct Targets {
    std::optional<std::string> log         = {};
    std::optional<std::string> tensorboard = {};
  };
  TrainRecords(Progress& progress, const Targets& targets, std::int64_t first_step);  // throws Error(backend)

  void add(const StepRecord& record);
  void add(const EvalRecord& record);
  [[nodiscard]] std::optional<Error> failure() const;

 private:
  template <class Record>
  void add_to_all(const Record& record);
  void note(const Error& error);

  Progress& progress_;
  std::optional<TrainLog> log_;
  std::optional<TensorboardFile> tensorboard_;
  std::optional<Error> first_failure_;
  std::int64_t num_lost_ = 0;  // records
};

}  // namespace stepgraph::cli
