#pragma once
#include <memory>
#include <vector>

#include "engine/run/world.hpp"

namespace stepgraph {

struct CudaWorldOptions {
  std::vector<int> devices = {0};  // rank r lives on devices[r % size]
  // Whole steps become CUDA graphs: issued the second time they run, replayed from then on. A step with host nodes is
  // issued every time, and so is one that is recorded.
  bool capture = true;
  bool tf32    = false;  // products of f32 may be computed from 19 bits of each number
  // Waits after every node, so that what goes wrong in a kernel is told of the node that enqueued it. Slow.
  bool check_nodes = false;
};

// Ranks of this process on CUDA devices, several on one if need be: each has an arena and streams of its own, one for
// each lane, and a communication is copies and reductions, in rank order: the same bits as on loopback.
//
// One thread issues a step, node by node, and host nodes wait on a thread for each of their lanes; whoever waits for
// the step waits for the device. Throws Error(backend) where there is no such device, or the driver is too old.
class CudaWorld final : public World {
 public:
  explicit CudaWorld(int num_ranks, const CudaWorldOptions& options = {});
  ~CudaWorld() override;
  CudaWorld(const CudaWorld&)            = delete;
  CudaWorld& operator=(const CudaWorld&) = delete;

  [[nodiscard]] int num_ranks() const override;
  [[nodiscard]] bool is_local(Rank) const override { return true; }
  [[nodiscard]] bool waits(LaneKind) const override { return false; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  [[nodiscard]] Device* device() override;
  void communicate(const Context& context, const Exchange& exchange) override;
  void abort(std::string_view) noexcept override {}

  void set_capture(bool capture);  // as in the options, from the next step on; not while one is under way
  void synchronize();              // waits until all that was issued is done; throws Error(backend) if it failed

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stepgraph
