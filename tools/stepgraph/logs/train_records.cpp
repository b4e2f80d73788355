#include "tools/stepgraph/logs/train_records.hpp"

namespace stepgraph::cli {

TrainRecords::TrainRecords(Progress& progress, const Targets& targets, std::int64_t first_step) : progress_(progress) {
  if (targets.log) log_.emplace(*targets.log, first_step);
  if (targets.tensorboard) tensorboard_.emplace(*targets.tensorboard, first_step);
}

template <class Record>
void TrainRecords::add_to_all(const Record& record) {
  try {
    if (log_) log_->add(record);
  } catch (const Error& error) {
    note(error);
  }
  try {
    if (tensorboard_) tensorboard_->add(record);
  } catch (const Error& error) {
    note(error);
  }
}

void TrainRecords::add(const StepRecord& record) { add_to_all(record); }
void TrainRecords::add(const EvalRecord& record) { add_to_all(record); }

void TrainRecords::note(const Error& error) {
  ++num_lost_;
  if (first_failure_) return;
  first_failure_ = error;
  progress_.note(str("stepgraph train: ", error.what(), "; the run goes on without this line"));
}

std::optional<Error> TrainRecords::failure() const {
  if (!first_failure_) return std::nullopt;
  return Error(ErrorKind::run, str(first_failure_->what(), "; ", num_lost_,
                                   num_lost_ == 1 ? " line is missing" : " lines are missing"));
}

}  // namespace stepgraph::cli
