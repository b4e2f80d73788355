#include "engine/simulate/rate_table.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

bool amount(double value) { return value >= 0 && std::isfinite(value); }
bool time(double seconds) { return seconds > 0 && std::isfinite(seconds); }

// Distances are measured in doublings. Values below 1 count as 1.
double octaves(double value) { return std::log2(std::max(value, 1.0)); }

// The ratio of a node's work to a point's: in flops if both have some, else in bytes.
double times_the_work(double flops, double bytes_moved, const RatePoint& point) {
  const bool computes = flops > 0 && point.flops > 0;
  return std::max(computes ? flops : bytes_moved, 1.0) / std::max(computes ? point.flops : point.bytes_moved, 1.0);
}

}  // namespace

RateTable::RateTable(std::vector<RatePoint> points) : points_(std::move(points)) {
  if (points_.empty()) throw Error(ErrorKind::config, "rate table: has no points (one or more)");
  for (const RatePoint& point : points_) {
    if (amount(point.flops) && amount(point.bytes_moved) && time(point.busy_s) && time(point.alone_s) &&
        (point.paired_s == 0 || time(point.paired_s)) && (point.halved_s == 0 || time(point.halved_s)))
      continue;
    throw Error(
        ErrorKind::config,
        str("rate table: ", point.flops, " flops and ", point.bytes_moved, " bytes take ", point.busy_s,
            " s while other workers are busy, ", point.alone_s, " s alone, ", point.paired_s, " s with one helper and ",
            point.halved_s, " s beside one other node (amounts of at least 0, times above 0; the last two may be 0)"));
  }
}

// Shepard's method on the logarithm of time per work. Weights fall with the fourth power of the distance, so that a
// neighbour of half the size hardly affects a measured size.
RatePoint RateTable::at(double flops, double bytes_moved) const {
  double weights = 0, busy = 0, alone = 0, paired = 0, halved = 0;
  bool all_paired = true, all_halved = true;
  for (const RatePoint& point : points_) {
    const double across  = octaves(flops) - octaves(point.flops),
                 along   = octaves(bytes_moved) - octaves(point.bytes_moved);
    const double squared = across * across + along * along;
    if (squared == 0) return {flops, bytes_moved, point.busy_s, point.alone_s, point.paired_s, point.halved_s};
    const double weight = 1 / (squared * squared), times = times_the_work(flops, bytes_moved, point);
    weights += weight;
    busy += weight * std::log(point.busy_s * times);
    alone += weight * std::log(point.alone_s * times);
    if (point.paired_s > 0) paired += weight * std::log(point.paired_s * times);
    if (point.halved_s > 0) halved += weight * std::log(point.halved_s * times);
    all_paired = all_paired && point.paired_s > 0;
    all_halved = all_halved && point.halved_s > 0;
  }
  return {flops,
          bytes_moved,
          std::exp(busy / weights),
          std::exp(alone / weights),
          all_paired ? std::exp(paired / weights) : 0,
          all_halved ? std::exp(halved / weights) : 0};
}

}  // namespace stepgraph
