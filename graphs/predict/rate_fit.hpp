#pragma once
#include <optional>
#include <span>
#include <vector>

// The times of a RatePoint (engine/simulate/rate_table.hpp) from measurements in steps, where other nodes run beside a
// node. Internal to graphs/predict.
namespace stepgraph::trials {

// A measured node: the share of the other workers that could help it (TaskTime::helped_share), and its time.
struct Sample {
  double helped_share = 0;
  double seconds      = 0;
};

// The mean, because sums of times are predicted. The slowest tenth (of three: one) is left out: other programs had the
// processor then. There is at least one.
[[nodiscard]] double usual_seconds(std::vector<double> seconds);

// Speed grows with the share of helpers (engine/simulate/machine.hpp). If some samples of nodes of one cost had almost
// no help and others had much, this is the line through both: the times at 0 and at 1. There are `others` other
// workers.
struct BothTimes {
  double busy_s, alone_s;
};
[[nodiscard]] std::optional<BothTimes> times_on_line(std::span<const Sample> samples, int others);
// Else `ratio` = busy_s / alone_s must be known, from other sizes or other ops; it is applied to the samples with the
// most help. There is at least one sample.
[[nodiscard]] BothTimes times_by_ratio(std::span<const Sample> samples, double ratio);

// The time with one helper, if there are at least two other workers: that on the line, and that of samples with about
// one helper. None: there are no such samples.
[[nodiscard]] double paired_on_line(const BothTimes& times, int others);
[[nodiscard]] std::optional<double> paired_seconds(std::span<const Sample> samples, const BothTimes& times, int others);

}  // namespace stepgraph::trials
