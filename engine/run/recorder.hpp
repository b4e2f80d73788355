#pragma once
#include <memory>

#include "engine/graph/timeline.hpp"

namespace stepgraph {

class Recording;  // engine/run/recording.hpp

// Measures steps: when each node began and ended, and on which worker.
//
//   Recorder recorder;
//   executor.run(program, &recorder);
//   write_trace(runnable, recorder.timeline(), "trace.json");
//
// Two readings of the processor's counter and 24 bytes for each task; without a recorder a step costs what it always
// did. Usable run after run, each forgetting the one before. One step at a time; a recorder may be dropped while its
// step runs.
class Recorder {
 public:
  Recorder();
  Recorder(const Recorder&)            = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();

  // The last step that was started with it, once that has ended (get() has returned or thrown, or done() is true).
  // Zero is the moment when Executor::start began it, the makespan the end of its last node. The parts of one
  // communication that ran as one task have the same times; a body that waits, waits on its own time. In a step that
  // failed, nodes that never began have not `ran()`; the same goes for nodes of ranks that live elsewhere.
  // Throws Error(config) when nothing was recorded yet or the step is still under way, Error(backend) when there was
  // no memory for what it would have recorded.
  [[nodiscard]] Timeline timeline() const;

 private:
  friend class Executor;
  std::shared_ptr<Recording> recording_;  // shared with the step: a body left behind may still write to it
};

}  // namespace stepgraph
