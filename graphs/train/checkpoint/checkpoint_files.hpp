#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/run/executor.hpp"
#include "graphs/files/checkpoint_manifest.hpp"
#include "graphs/train/checkpoint/checkpoint_parts.hpp"

// Internal to graphs/train.
namespace stepgraph {

class StepRun;

// The files of a checkpoint that the ranks of this process write. A graph on disk lanes writes them, with an executor
// of its own. The same files, with other bytes, are written for each checkpoint. Use it between steps, on one thread.
class CheckpointFiles {
 public:
  CheckpointFiles(const StepRun& run, const TensorNumbers& numbers);  // the values of `run` must outlive it
  CheckpointFiles(const CheckpointFiles&)            = delete;
  CheckpointFiles& operator=(const CheckpointFiles&) = delete;
  ~CheckpointFiles();

  [[nodiscard]] std::vector<Rank> ranks() const;
  [[nodiscard]] std::vector<std::int64_t> rank_bytes() const;  // of each rank's file

  // Makes the graph, once. With `async` it has memory for a copy of all states, which it writes while steps go on.
  void build(bool async);
  [[nodiscard]] bool is_built() const noexcept { return program_ != nullptr; }
  // With `async`, before start(): copies the states to host memory.
  void stage();
  [[nodiscard]] Run start(const std::string& folder);

  // After the run.
  void close();
  [[nodiscard]] double written_s() const;  // from the start of the run until the last file was on the disk
  [[nodiscard]] std::vector<CheckpointFile> entries() const;  // for the manifest

 private:
  struct State;
  Graph write_graph(bool async);
  void add_rank(Graph& graph, std::size_t r, Rank lane_rank, bool async);

  std::shared_ptr<State> state_;  // shared with node bodies
  int threads_;                   // of the step
  std::vector<Buffer> staging_;   // by local rank, with `async`
  std::unique_ptr<Program> program_;
  std::unique_ptr<Executor> executor_;
};

}  // namespace stepgraph
