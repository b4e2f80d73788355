#pragma once
#include <memory>
#include <vector>

#include "engine/run/world.hpp"

namespace stepgraph {

struct CudaWorldOptions {
  std::vector<int> devices = {0};  // rank r uses devices[r % size]
  // Captures whole steps as CUDA graphs: the second run is captured, later runs replay it. Steps with host nodes and
  // recorded steps are issued node by node every time.
  bool capture = true;
  bool tf32    = false;  // f32 products may use 19 bits of each operand
  // Synchronizes after every node, so that a kernel error names the node that enqueued it. Slow.
  bool check_nodes = false;
};

// Ranks of this process on CUDA devices, possibly several per device. Each rank has its own arenas and one stream per
// lane. A communication is copies and reductions in rank order: the same bits as on loopback.
//
// One thread issues a step, node by node. Host nodes wait on a thread per lane. Waiting for a step waits for the
// device. A device that has not finished a stopped step in time is given up: later runs, reads and writes throw
// Error(backend). Throws Error(backend) if a device does not exist or the driver is too old.
class CudaWorld final : public World {
 public:
  explicit CudaWorld(int num_ranks, const CudaWorldOptions& options = {});
  ~CudaWorld() override;
  CudaWorld(const CudaWorld&)            = delete;
  CudaWorld& operator=(const CudaWorld&) = delete;

  [[nodiscard]] int num_ranks() const override;
  [[nodiscard]] bool waits(LaneKind) const override { return false; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  [[nodiscard]] Device* device() const override;
  void communicate(const Context& context, const Exchange& exchange) override;
  void abort(std::string_view) noexcept override {}

  void set_capture(bool capture);  // as in the options, from the next step on; not during a step
  void synchronize();              // waits for all issued work; throws Error(backend) if it failed

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;  // stays alive if a device never finishes a step
};

}  // namespace stepgraph
