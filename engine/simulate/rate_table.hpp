#pragma once
#include <span>
#include <vector>

namespace stepgraph {

// Measured times of a node of a given cost, on one worker of a pool.
struct RatePoint {
  double flops       = 0;
  double bytes_moved = 0;
  double busy_s      = 0;  // while every other worker ran a node of its own
  double alone_s     = 0;  // while the others were idle: less contention, or help
  friend bool operator==(const RatePoint&, const RatePoint&) = default;
};

// Times of one op, measured at several sizes. For ops that no single Rate fits: small sizes have other costs than large
// ones, and memory is faster while the data fits a cache. Plain data, checked on construction (Error(config)).
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
