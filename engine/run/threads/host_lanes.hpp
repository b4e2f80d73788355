#pragma once
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/graph/ordered_graph.hpp"

namespace stepgraph {

// The host nodes of a program on a device: internal to engine/. Each lane with host nodes has a thread of its own,
// which runs them and waits for the nodes that they follow. The thread that issues nodes to the device goes on
// meanwhile, and waits only before a node that follows a host node; of nodes on LaneKind::host only where the device
// cannot wait for them itself (DeviceStreams::waits_for_host). Host nodes without a lane run on the issuing thread.
class HostLanes {
 public:
  HostLanes(const OrderedGraph& ordered, std::span<const std::uint32_t> issue_order);

  [[nodiscard]] std::size_t size() const noexcept { return queues_.size(); }
  [[nodiscard]] std::vector<Lane> lanes() const;
  [[nodiscard]] const std::vector<std::uint32_t>& nodes(std::size_t lane) const { return queues_[lane].nodes; }

  void begin() noexcept;  // before a run, when no thread uses it
  void stop() noexcept;   // ends all waiting; from any thread

  // On the issuing thread. True: the node is a host node of a lane, whose thread may run it from here on.
  [[nodiscard]] bool hand_over(std::uint32_t node) noexcept;
  void wait_for_all() const noexcept;

  // On the thread of a lane: waits until the lane's i-th node was handed over, or stop(); and counts it as done.
  void wait_until_handed(std::size_t lane, std::size_t i) const noexcept;
  void set_done(std::size_t lane) noexcept;

  // On any thread: waits until the host nodes of other lanes that `node` follows are done, or stop(). With
  // `device_waits`, those of LaneKind::host are left to the device.
  void wait_before(std::uint32_t node, bool device_waits = false) const noexcept;

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0}, stopped = std::uint32_t{1} << 31;

  struct Queue {
    Lane lane;
    std::vector<std::uint32_t> nodes;
    std::atomic<std::uint32_t> handed{0}, done{0};  // numbers of nodes; the highest bit: stop()
  };
  struct Place {
    std::uint32_t queue = none, number = 0;
  };
  static void wait_for(const std::atomic<std::uint32_t>& count, std::uint32_t wanted) noexcept;

  std::vector<Queue> queues_;
  std::vector<Place> place_;                     // by node
  std::vector<std::uint32_t> first_, followed_;  // by node, in compressed rows
};

}  // namespace stepgraph
