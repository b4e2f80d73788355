#pragma once
#include <chrono>
#include <memory>

#include "engine/graph/timeline.hpp"

namespace stepgraph {

class Recording;  // engine/run/program/recording.hpp

// Measures steps: when each node began and ended, and on which worker.
//
//   Recorder recorder;
//   executor.run(program, &recorder);
//   write_trace(runnable, recorder.timeline(), "trace.json");
//
// Costs two readings of the processor's counter and 24 bytes for each task; a step without a recorder costs nothing
// extra. A recorder can be used for many runs, one at a time; it keeps the times of the last one. It may be destroyed
// while its step runs.
class Recorder {
 public:
  Recorder();
  Recorder(const Recorder&)            = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();

  // The last step that was started with it, once that has ended (get() has returned or thrown, or done() is true).
  // Time 0 is the call of Executor::start, the makespan is the end of the last node. The parts of one communication
  // that ran as one task have the same times. The time of a node includes the time that its body waits. Nodes that did
  // not start in a failed step have not `ran()`. Throws Error(config) when nothing was recorded yet or the step still
  // runs, Error(backend) when the recorder ran out of memory.
  [[nodiscard]] Timeline timeline() const;
  [[nodiscard]] std::chrono::steady_clock::time_point began() const;  // time 0 of the timeline

 private:
  friend class Executor;
  std::shared_ptr<Recording> recording_;  // shared with the step: a body left behind may still write to it
};

}  // namespace stepgraph
