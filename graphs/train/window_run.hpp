#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "graphs/train/trainer.hpp"

// Runs asynchronous windows: internal to graphs/train.
namespace stepgraph {

// The inputs of one step of a window.
struct WindowStep {
  std::span<const std::int32_t> inputs = {}, targets = {};  // of all ranks
  std::vector<double> rates = {};                           // the optimizer's, then those of its groups
};

// The windows of a trainer. Its own step is the longest; shorter ones use the bytes of its weights and states. Each
// length is built when it is first needed. One thread at a time.
class WindowRuns {
 public:
  using Build = std::function<StepGraph(int steps)>;
  // At most as many steps as the trainer's window has. `done`: steps before them.
  std::vector<StepResult> run(StepRun& run, const Build& build, std::span<const WindowStep> steps, std::int64_t done,
                              Recorder* recorder);
  void prepare(const StepRun& run, const Build& build, std::size_t steps);  // a window of so many steps
  // The window that was last run with a recorder; the trainer's own if none was.
  [[nodiscard]] StepView recorded(const StepRun& run) const;

 private:
  struct Window {
    StepGraph step;
    RunnableGraph runnable;
    std::unique_ptr<Program> program = {};
  };
  const Window& shorter(const StepRun& run, const Build& build, int steps);

  std::map<int, Window> shorter_;  // by length
  int recorded_ = 0;               // its steps; 0: none, or the trainer's own
};

// Throws Error(config) if ranks of the world cannot share weights.
void check_asynchronous_world(World& world);

}  // namespace stepgraph
