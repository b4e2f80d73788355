#pragma once
#include <span>
#include <vector>

namespace stepgraph {

// How long a node of some cost took, on one worker of a pool of several.
struct RatePoint {
  double flops                                               = 0;
  double bytes_moved                                         = 0;
  double busy_s                                              = 0;  // while every other worker had a node of its own
  double alone_s                                             = 0;  // while none had: they helped, or left it the memory
  friend bool operator==(const RatePoint&, const RatePoint&) = default;
};

// Nodes of one op, measured at several sizes: where no single Rate fits, because small work has other costs than large
// work, and memory is faster while it fits a cache. Plain data, checked when it is made (Error(config)).
class RateTable {
 public:
  explicit RateTable(std::vector<RatePoint> points);

  // What a node of that cost takes: in proportion to the flops (bytes, where one of them has none) of the points around
  // it, the nearer in flops and bytes the more. A point's own cost gives the point's own times.
  [[nodiscard]] RatePoint at(double flops, double bytes_moved) const;

  [[nodiscard]] std::span<const RatePoint> points() const noexcept { return points_; }
  friend bool operator==(const RateTable&, const RateTable&) = default;

 private:
  std::vector<RatePoint> points_;
};

}  // namespace stepgraph
