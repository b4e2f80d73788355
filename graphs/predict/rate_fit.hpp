#pragma once
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "engine/simulate/rate_table.hpp"

// The times of a RatePoint (engine/simulate/rate_table.hpp) from measurements in steps, where other nodes run beside a
// node. Internal to graphs/predict.
namespace stepgraph::trials {

// A measured node: the share of the other workers that could help it (TaskTime::helped_share), and its time.
struct Sample {
  double helped_share = 0;
  double seconds      = 0;
};
using Key         = std::tuple<std::string, double, double>;  // op, flops, bytes
using NodeSamples = std::map<Key, std::vector<Sample>>;       // there is at least one for each key

// The points of each op. There are `others` other workers.
[[nodiscard]] std::map<std::string, std::vector<RatePoint>> fitted_points(const NodeSamples& samples, int others);

// --- its parts -------------------------------------------------------------------------------------------------
// The mean, because sums of times are predicted. Times above three times the median (of an even number: the lower of
// the two) are left out: other programs had the processor then. There is at least one.
[[nodiscard]] double usual_seconds(std::vector<double> seconds);

// Speed grows with the share of helpers (engine/simulate/machine.hpp). If some samples of nodes of one cost had almost
// no help and others had much, this is the line through both: the times at 0 and at 1.
struct BothTimes {
  double busy_s, alone_s;
};
[[nodiscard]] std::optional<BothTimes> times_on_line(std::span<const Sample> samples, int others);
// Else `ratio` = busy_s / alone_s must be known, from other sizes or other ops; it is applied to the samples with the
// most help. There is at least one sample.
[[nodiscard]] BothTimes times_by_ratio(std::span<const Sample> samples, double ratio);

// A time with a share of all helpers.
struct Helped {
  double share, seconds;
};
// The time with a share of helpers between two others: that on the line, and that of samples with about this share, but
// not more than `bound`. None: there are no such samples.
[[nodiscard]] double seconds_on_line(const Helped& less, const Helped& more, double share);
[[nodiscard]] std::optional<double> seconds_between(std::span<const Sample> samples, const Helped& less,
                                                    const Helped& more, double share, double bound = 1);

}  // namespace stepgraph::trials
