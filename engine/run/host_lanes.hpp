#pragma once
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/graph/ordered_graph.hpp"

namespace stepgraph {

// Host nodes of a device's program: internal to engine/. Each lane that has some has a thread of its own, which waits
// for what they follow while the thread that issues goes on; that one waits only before a node that follows one of
// them. A host node without a lane is none of these: whoever issues runs it.
class HostLanes {
 public:
  HostLanes(const OrderedGraph& ordered, std::span<const std::uint32_t> issue_order);

  [[nodiscard]] std::size_t size() const noexcept { return queues_.size(); }
  [[nodiscard]] std::vector<Lane> lanes() const;
  [[nodiscard]] const std::vector<std::uint32_t>& nodes(std::size_t lane) const { return queues_[lane].nodes; }

  void begin() noexcept;  // a run, before any thread is at it
  void stop() noexcept;   // nobody waits any more; from any thread

  // By the thread that issues. Whether it is a lane's: then that lane's thread may run it from here on.
  [[nodiscard]] bool hand_over(std::uint32_t node) noexcept;
  void wait_for_all() const noexcept;

  // By a lane's thread: until its i-th node was handed over, or everything stops; and that it is done.
  void wait_until_handed(std::size_t lane, std::size_t i) const noexcept;
  void set_done(std::size_t lane) noexcept;

  // By anybody: until the host nodes of other lanes that `node` follows are done, or everything stops.
  void wait_before(std::uint32_t node) const noexcept;

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0}, stopped = std::uint32_t{1} << 31;

  struct Queue {
    Lane lane;
    std::vector<std::uint32_t> nodes;
    std::atomic<std::uint32_t> handed{0}, done{0};  // how many of them; the highest bit: everything stops
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
