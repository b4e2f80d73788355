#pragma once
#include <memory>
#include <vector>

#include "engine/run/executor.hpp"
#include "engine/run/recorder.hpp"
#include "engine/run/world.hpp"

namespace stepgraph::bench {

// AdamW of the host on pinned memory, and copies between pinned and device memory in both directions beside it. Each is
// a chain of nodes on a lane of its own: host, h2d and d2h.
class AdamBesideCopies {
 public:
  // `copies` of each direction, of `copy_bytes`; 0: AdamW alone.
  AdamBesideCopies(World& world, std::int64_t elements, std::int64_t copy_bytes, int copies, int threads);

  struct Rates {
    double adam_s   = 0;
    double h2d_rate = 0, d2h_rate = 0;  // bytes a second while AdamW ran
    double copies_s = 0;                // from the first copy's begin to the last one's end
  };
  // One update with all copies.
  [[nodiscard]] Rates run();
  void check() const;  // throws Error(run) for wrong weights or copies

 private:
  std::int64_t copy_bytes_;
  Graph graph_;
  Node update_;
  Buffer weight_, gradient_, first_, second_, factor_, rate_, step_;
  Buffer host_in_, device_in_, device_out_, host_out_;
  int copies_;
  std::unique_ptr<Program> program_;
  std::unique_ptr<Executor> executor_;
  std::int64_t steps_ = 0;
};

}  // namespace stepgraph::bench
