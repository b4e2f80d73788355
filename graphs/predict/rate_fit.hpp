#pragma once
#include <optional>
#include <span>

#include "engine/simulate/rate_table.hpp"

// The times of a RatePoint from measurements in steps, where other nodes run beside a node. Internal to graphs/predict.
namespace stepgraph::trials {

// A measured node: the share of the other workers that could help it (TaskTime::helped_share), and its time.
struct Sample {
  double helped_share = 0;
  double seconds      = 0;
};

// The quantile of times that counts: below the median, because other programs only make nodes slower.
inline constexpr double undisturbed = 0.35;

// Speed grows linearly with the share of helpers (engine/simulate/machine.hpp). If some samples of nodes of one
// cost had almost no help and others had much, this is the line through both: the times at 0 and at 1.
struct BothTimes {
  double busy_s, alone_s;
};
[[nodiscard]] std::optional<BothTimes> both_times(std::span<const Sample> samples);
// Else `ratio` = busy_s / alone_s must be known, from other sizes or other ops; it is applied to the samples with the
// most help. There is at least one sample.
[[nodiscard]] BothTimes both_times(std::span<const Sample> samples, double ratio);

}  // namespace stepgraph::trials
