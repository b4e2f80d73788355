#pragma once
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <vector>

// Internal to graphs/train.
namespace stepgraph {

struct CheckpointOptions;

// The checkpoints of one run among those in its folder, which may have checkpoints of other runs too. Process 0 has it.
class CheckpointSeries {
 public:
  // `steps`: those of the loaded checkpoint, or 0. Removes temporary folders that killed processes have left.
  CheckpointSeries(const CheckpointOptions& options, std::int64_t steps);

  // Removes temporary folders again, and waits for old checkpoints that are being removed.
  void remove_leftovers();
  // Before the first checkpoint of this run gets its name: those that do not belong to the run lose theirs. Adds the
  // names that they get to `names`, also if it throws. Later calls clear `names`.
  void put_others_aside(std::vector<std::string>& names);
  // Gives a temporary folder its name: it is now a checkpoint of this run.
  void put_in_place(const std::string& partial, const std::string& path);
  // Counts it, and removes those that are older than the newest `keep` of this run.
  void add(std::int64_t steps);

 private:
  std::string folder_;
  std::size_t keep_;
  std::int64_t steps_at_start_;
  bool continues_ = false;      // the loaded checkpoint is in the folder
  bool committed_ = false;      // a checkpoint of this run has its name
  std::set<std::int64_t> own_;  // steps of the whole checkpoints in the folder that belong to this run
  std::jthread removing_;       // may take long: a checkpoint is large
};

}  // namespace stepgraph
