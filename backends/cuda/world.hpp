#pragma once
#include <memory>
#include <vector>

#include "engine/run/world.hpp"

namespace stepgraph {
namespace cuda {
class Ranks;  // backends/cuda/ranks.hpp
}

struct CudaWorldOptions {
  // Rank r uses devices[r % size]. At most as many as ranks. A number may come several times: {0, 0} is two logical
  // devices on one GPU. Empty: all visible devices, at most one for each rank.
  std::vector<int> devices = {0};
  // Captures whole steps as CUDA graphs: the second run is captured, later runs replay it. Steps with host nodes and
  // recorded steps are issued node by node every time.
  bool capture = true;
  bool tf32    = false;  // f32 products may use 19 bits of each operand
  bool pinned  = true;   // false: host memory of ranks is pageable, and nothing is captured: for comparison
  // Synchronizes after every node, so that a kernel error names the node that enqueued it. Slow.
  bool check_nodes = false;
};

// Ranks of this process on CUDA devices, possibly several per device. Each rank has its own arenas and one stream per
// lane. A communication is copies and reductions in rank order, by the device of its first member: the same bits as on
// loopback. Several devices use each other's memory (peer access).
//
// One thread issues a step, node by node. Host nodes wait on a thread per lane. Waiting for a step waits for the
// streams of this world, and not for other work on the devices: worlds in several threads do not disturb each other. A
// device that has not finished a stopped step in time is given up: later runs, reads and writes throw Error(backend).
// Throws Error(config) for a list of devices that is longer than the ranks, and Error(backend) if a device does not
// exist, two devices have no peer access, or the driver is too old.
class CudaWorld final : public World {
 public:
  explicit CudaWorld(int num_ranks, const CudaWorldOptions& options = {});
  ~CudaWorld() override;
  CudaWorld(const CudaWorld&)            = delete;
  CudaWorld& operator=(const CudaWorld&) = delete;

  [[nodiscard]] int num_ranks() const override { return num_ranks_; }
  [[nodiscard]] bool waits(LaneKind) const override { return false; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  [[nodiscard]] Device* device() const override;
  void communicate(const Context& context, const Exchange& exchange) override;
  void abort(std::string_view) noexcept override {}

  void set_capture(bool capture);  // as in the options, from the next step on; not during a step
  void synchronize();              // waits for all issued work; throws Error(backend) if it failed

 private:
  int num_ranks_;
  std::shared_ptr<cuda::Ranks> ranks_;  // stays alive if a device never finishes a step
};

}  // namespace stepgraph
