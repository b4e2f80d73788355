#pragma once
#include <span>
#include <vector>

namespace stepgraph {

// Measured times of a node of a given cost, on one worker of a pool.
struct RatePoint {
  double flops       = 0;
  double bytes_moved = 0;
  double busy_s      = 0;  // while all other workers had nodes
  double alone_s     = 0;  // while no other worker had one: they helped, or left it the memory bandwidth
  double paired_s    = 0;  // with one helper: half of all workers had nodes; 0: not measured
  double halved_s    = 0;  // beside one other node: each had half of the idle workers; 0: not measured
  friend bool operator==(const RatePoint&, const RatePoint&) = default;
};

// The number of helpers of each of two nodes that share all `others` + 1 workers.
[[nodiscard]] constexpr double halved_helpers(int others) { return (others - 1) / 2.0; }

// Measured times of one op at several sizes, for ops that no single Rate describes: small work has other costs than
// large work, and memory in a cache is faster. Plain data, checked when it is made (Error(config)).
class RateTable {
 public:
  explicit RateTable(std::vector<RatePoint> points);

  // The times of a node of the given cost. Scales the surrounding points in proportion to flops (to bytes if either has
  // no flops); nearer points, in flops and bytes, weigh more. The exact cost of a point gives exactly that point's
  // times.
  [[nodiscard]] RatePoint at(double flops, double bytes_moved) const;

  [[nodiscard]] std::span<const RatePoint> points() const noexcept { return points_; }
  friend bool operator==(const RateTable&, const RateTable&) = default;

 private:
  std::vector<RatePoint> points_;
};

}  // namespace stepgraph
