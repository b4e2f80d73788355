#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graphs/files/checkpoint_reader.hpp"
#include "graphs/train/trainer.hpp"

// Checkpoints of a training run: weights, optimizer states and the state of the run, which a Trainer of any other
// layout, sharding, schedule, precision or number of processes can load. graphs/train/README.md has a guide.
namespace stepgraph {

struct CheckpointOptions {
  std::string folder;  // has a folder `step-000000120` for each checkpoint; made when it is missing
  // The checkpoint that the trainer has loaded; empty: none. If it is in the folder, it and those with fewer steps
  // belong to this run.
  std::string loaded = {};
  // The newest checkpoints of this run that stay; older ones of this run are removed. 0: all stay.
  int keep   = 2;
  bool async = true;  // states are copied to host memory, and written while steps go on
  // Whether a whole checkpoint of the same number of steps is replaced, or put aside if it is of another run; else
  // save() throws Error(config). One that is not whole never stops a save.
  bool replace = false;
};

// Of the last checkpoint that was saved.
struct CheckpointFigures {
  std::vector<Rank> ranks              = {};     // of this process
  std::vector<std::int64_t> rank_bytes = {};     // written by each of them, headers included
  double staged_s                      = 0;      // the time in save(); without `async` all of it
  double written_s                     = 0;      // from the start of the writing until the files were on the disk
  bool async                           = false;  // false: not asked for, or there is too little memory for a copy
  std::vector<std::string> put_aside   = {};     // names that checkpoints of other runs now have
  [[nodiscard]] std::int64_t num_bytes() const noexcept;
};

// Writes checkpoints of a trainer, which must outlive it. Each rank writes its own file, and each element is written by
// one rank. A checkpoint is whole or absent: the files are written to a temporary folder, which gets its name when all
// are on the disk. Use it between steps, on one thread. Functions are collective unless said otherwise, and an error of
// one process is thrown in all; older checkpoints then stay, and another save() can be tried.
//
// Make it when the trainer has loaded its checkpoint. Checkpoints in the folder that do not belong to this run are
// renamed to step-N.aside-RANDOM just before the first one of this run gets its name, so that they are neither resumed
// nor counted nor removed: those with more steps than the loaded one, and all of them if it is not in the folder.
//
//   sg::CheckpointWriter writer(trainer, {.folder = "run"});
//   writer.save(position, config);           // with `async` it returns when the states are copied
//   trainer.step(tokens);
//   writer.finish();                         // waits, and gives the checkpoint its name
class CheckpointWriter {
 public:
  // Removes temporary folders that killed processes have left.
  CheckpointWriter(Trainer& trainer, CheckpointOptions options);
  CheckpointWriter(const CheckpointWriter&)            = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  ~CheckpointWriter();  // not collective: a checkpoint that was not finished is removed

  // Saves the trainer's state after its completed steps. An earlier save that is under way is finished first.
  // Returns when the states are copied (with `async`) or written; finish() gives the checkpoint its name in both cases.
  // `position`: sequences that were consumed. `config`: JSON of the run, or empty.
  void save(std::int64_t position, std::string config = {});
  // Not collective: the files of this process are written (or could not be), or none is under way. Never waits.
  [[nodiscard]] bool is_written() const noexcept;
  // Waits for the files of all processes, and gives the checkpoint its name. Then removes the oldest beyond `keep`.
  // Returns the path of the checkpoint; none: no save was under way.
  std::optional<std::string> finish();
  [[nodiscard]] const CheckpointFigures& figures() const noexcept;  // not collective

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Sets weights, masters, moments, number of steps, updates and loss scale of a trainer. The model and the optimizer's
// kind must be those of the checkpoint; all else may differ. Each process reads what its ranks need, and checks the
// hashes of all blocks that it reads. The position in the returned state is in sequences of the trainer's length: of
// another length, as many whole sequences as have been read in tokens.
// Throws Error(config) that names the checkpoint and says what is wrong with it, in all processes. Errors of the system
// or a device that say nothing about the checkpoint have another kind. The trainer's weights are then undefined.
// Collective.
CheckpointState load_checkpoint(Trainer& trainer, const std::string& path);

struct Resumed {
  std::string path                 = {};
  CheckpointState state            = {};
  std::vector<std::string> refused = {};  // why newer ones were refused: one message each
};
// Loads the newest whole checkpoint of a folder. None: the folder has no checkpoint. Throws Error(config) if it has
// some and none is whole, and for a whole one that does not fit the trainer. Only damage makes it use an older one: a
// file that is missing, short or has another hash, a wrong manifest, or a disk that cannot read. Other errors, such as
// too little memory or a missing permission, are thrown in all processes. Collective.
std::optional<Resumed> resume_newest(Trainer& trainer, const std::string& folder);

// Renames a checkpoint to step-N.aside-RANDOM, and returns that name: it is no longer listed. Throws Error(backend).
// Not collective.
std::string put_aside_checkpoint(const std::string& path);

}  // namespace stepgraph
