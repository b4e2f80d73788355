#pragma once
#include <chrono>
#include <optional>
#include <string>

#include "engine/base/partial.hpp"
#include "graphs/train/checkpoint.hpp"
#include "tools/stepgraph/train/options.hpp"

// How a training run begins where another one has ended.
namespace stepgraph::cli {

// Held by the one run that writes to a folder of checkpoints: a lock on the file `.lock` in it.
class CheckpointLock {
 public:
  // Makes the folder. Throws Error(config) if another run has the lock. A process that was killed may have it for a
  // moment, so it is tried for so long.
  CheckpointLock(const std::string& folder, std::chrono::milliseconds patience);

 private:
  Descriptor file_;
};

// Where the weights of a run come from.
struct ResumeFrom {
  std::string path                   = {};  // a checkpoint, or a folder of checkpoints; empty: the run begins at step 0
  bool newest                        = false;  // the newest whole checkpoint in the folder `path`
  std::vector<CheckpointEntry> aside = {};     // to be put aside when the run can begin; in process 0
};

// Decides it, as the options and checkpoint.folder say: without --resume the folder must have no checkpoints, unless
// --force is given. Checks the seed and the length of sequences against the checkpoint. Throws Error(config). In
// process 0.
//
// A job that launch can start again notes in the folder where it begins. If it is started again before it has written a
// checkpoint of its own, it begins there once more, and not at a checkpoint of another run.
[[nodiscard]] ResumeFrom prepare_resume(const TrainOptions& options, const Config& config);
void forget_start(const std::string& folder);  // the job has a checkpoint, or the folder has none of other runs

// Renames checkpoints to step-N.aside-RANDOM, and says so on stderr.
void put_aside(const std::vector<CheckpointEntry>& entries);

// Loads the checkpoint. Says on stderr, in process 0, which ones were refused and what has changed since. Throws
// Error(config) if there is none that is whole and fits the run. Collective.
[[nodiscard]] Resumed load_resumed(Trainer& trainer, const ResumeFrom& from, const TrainOptions& options,
                                   const Config& config, const Batches& batches, World& world);

// The config that a checkpoint keeps, to be compared when it is resumed: a schedule of rates has its number of steps,
// and the section `run` has the numbers of tokens and training sequences of the data.
[[nodiscard]] std::string config_to_keep(const Config& config, const Batches& batches, std::int64_t num_steps);
// Says on stderr if the run's schedule of rates is not that of the checkpoint.
void compare_schedules(const CheckpointState& state, const Config& config, std::int64_t num_steps);

}  // namespace stepgraph::cli
