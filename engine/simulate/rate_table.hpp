#pragma once
#include <span>
#include <vector>

namespace stepgraph {

// The measured time of a node with a given cost, on one worker of a pool.
struct RatePoint {
  double flops       = 0;
  double bytes_moved = 0;
  double busy_s      = 0;  // while all other workers had nodes
  double alone_s     = 0;  // while no other worker had one: they helped, or left it the memory bandwidth
  friend bool operator==(const RatePoint&, const RatePoint&) = default;
};

// Measured times of one op at several sizes, for ops that no single Rate describes: small work has other costs than
// large work, and memory in a cache is faster. Plain data, checked when it is made (Error(config)).
class RateTable {
 public:
  explicit RateTable(std::vector<RatePoint> points);

  // The times of a node of that cost: those of the points around it, scaled by flops (by bytes, if the node or the
  // point has no flops) and weighted by nearness in flops and bytes. The cost of a point gives exactly its times.
  [[nodiscard]] RatePoint at(double flops, double bytes_moved) const;

  [[nodiscard]] std::span<const RatePoint> points() const noexcept { return points_; }
  friend bool operator==(const RateTable&, const RateTable&) = default;

 private:
  std::vector<RatePoint> points_;
};

}  // namespace stepgraph
