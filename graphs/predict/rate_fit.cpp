#include "graphs/predict/rate_fit.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "engine/base/quantile.hpp"
#include "graphs/predict/trials.hpp"

namespace stepgraph::trials {
namespace {

constexpr double little = 0.2, far_apart = 0.35, nearby = 0.15;  // of shares
static_assert(far_apart > 2 * nearby);
constexpr double few_helpers = 0.5;  // a number, not a share

bool helped_less(const Sample& a, const Sample& b) { return a.helped_share < b.helped_share; }

// What samples with shares from `least` to `most` have in common. There is at least one.
Sample middle(std::span<const Sample> samples, double least, double most) {
  std::vector<double> shares, seconds;
  for (const Sample& sample : samples) {
    if (sample.helped_share < least || sample.helped_share > most) continue;
    shares.push_back(sample.helped_share);
    seconds.push_back(sample.seconds);
  }
  return {quantile(shares, 0.5), usual_seconds(std::move(seconds))};
}

// A ratio of two times of nodes of one cost, by op. Where it was not measured for a size, the op's median counts, else
// that of all ops. Helpers do not make a copy to or from a disk faster.
class OpRatios {
 public:
  void add(const std::string& op, double ratio) {
    of_op_[op].push_back(ratio);
    all_.push_back(ratio);
  }
  [[nodiscard]] double usual(const std::string& op) const {
    const auto found = of_op_.find(op);
    if (found != of_op_.end()) return quantile(found->second, 0.5);
    const bool is_copy = is_transfer(op) || op.starts_with("disk_");
    return all_.empty() || is_copy ? 1 : quantile(all_, 0.5);
  }

 private:
  std::map<std::string, std::vector<double>> of_op_;
  std::vector<double> all_;
};

// A time of a point, and the share of all helpers that the node has then.
struct Measure {
  double share;
  double RatePoint::*seconds;
  [[nodiscard]] Helped of(const RatePoint& point) const { return {share, point.*seconds}; }
};

class Fit {
 public:
  Fit(const NodeSamples& samples, int others) : samples_(samples) {
    OpRatios helped;  // the time without help to that with all of it
    for (const auto& [key, list] : samples) {
      const auto times = times_on_line(list, others);
      if (!times) continue;
      helped.add(std::get<0>(key), times->busy_s / times->alone_s);
      if (std::max_element(list.begin(), list.end(), helped_less)->helped_share > 1 - nearby) with_both_.insert(key);
    }
    for (const auto& [key, list] : samples) {
      const auto& [op, flops, bytes] = key;
      const BothTimes times          = times_on_line(list, others).value_or(times_by_ratio(list, helped.usual(op)));
      points_[key] = {.flops = flops, .bytes_moved = bytes, .busy_s = times.busy_s, .alone_s = times.alone_s};
    }
  }

  // Adds a time to all points, from nodes with about as many helpers, but not more than `bound`. Where there are none,
  // it is as far from the line between two other times as it usually is for the op.
  void add_between(const Measure& less, const Measure& more, const Measure& between, double bound = 1) {
    const auto on_line = [&](const RatePoint& point) {
      return seconds_on_line(less.of(point), more.of(point), between.share);
    };
    const auto found = [&](const Key& key, const RatePoint& point) {
      return seconds_between(samples_.at(key), less.of(point), more.of(point), between.share, bound);
    };
    OpRatios ratios;
    for (const Key& key : with_both_) {
      const RatePoint& point = points_.at(key);
      if (const auto seconds = found(key, point)) ratios.add(std::get<0>(key), *seconds / on_line(point));
    }
    for (auto& [key, point] : points_)
      point.*between.seconds = found(key, point).value_or(on_line(point) * ratios.usual(std::get<0>(key)));
  }

  [[nodiscard]] std::map<std::string, std::vector<RatePoint>> by_op() const {
    std::map<std::string, std::vector<RatePoint>> points;
    for (const auto& [key, point] : points_) points[std::get<0>(key)].push_back(point);
    return points;
  }

 private:
  const NodeSamples& samples_;
  std::map<Key, RatePoint> points_;
  std::set<Key> with_both_;  // nodes that ran with no help and with all of it; the others' times are extrapolated
};

}  // namespace

std::map<std::string, std::vector<RatePoint>> fitted_points(const NodeSamples& samples, int others) {
  Fit fit(samples, others);
  const Measure busy{0, &RatePoint::busy_s}, paired{1.0 / others, &RatePoint::paired_s},
      halved{halved_helpers(others) / others, &RatePoint::halved_s}, alone{1, &RatePoint::alone_s};
  const bool has_halved = halved.share > paired.share;
  if (others > 1) fit.add_between(busy, alone, paired, has_halved ? (paired.share + halved.share) / 2 : 1);
  if (has_halved) fit.add_between(paired, alone, halved);
  return fit.by_op();
}

double usual_seconds(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const double most = 3 * seconds[(seconds.size() - 1) / 2];
  while (seconds.back() > most) seconds.pop_back();
  return std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
}

std::optional<BothTimes> times_on_line(std::span<const Sample> samples, int others) {
  if (samples.empty()) return std::nullopt;
  const auto [least, most] = std::minmax_element(samples.begin(), samples.end(), helped_less);
  if (least->helped_share > little || most->helped_share - least->helped_share < far_apart) return std::nullopt;
  const Sample busy =
      middle(samples, least->helped_share, least->helped_share + std::min(nearby, few_helpers / others));
  const Sample alone = middle(samples, most->helped_share - nearby, most->helped_share);
  const double slope = (1 / alone.seconds - 1 / busy.seconds) / (alone.helped_share - busy.helped_share);
  const auto seconds = [&](double share) {  // the speed is kept above 0
    return 1 / std::max(1 / busy.seconds + slope * (share - busy.helped_share),
                        0.5 / std::max(busy.seconds, alone.seconds));
  };
  return BothTimes{seconds(0), seconds(1)};
}

BothTimes times_by_ratio(std::span<const Sample> samples, double ratio) {
  const double most    = std::max_element(samples.begin(), samples.end(), helped_less)->helped_share;
  const Sample highest = middle(samples, most - nearby, most);
  const double alone_s = highest.seconds * (highest.helped_share + (1 - highest.helped_share) / ratio);
  return {alone_s * ratio, alone_s};
}

double seconds_on_line(const Helped& less, const Helped& more, double share) {
  const double part = (share - less.share) / (more.share - less.share);
  return 1 / ((1 - part) / less.seconds + part / more.seconds);
}

std::optional<double> seconds_between(std::span<const Sample> samples, const Helped& less, const Helped& more,
                                      double share, double bound) {
  const double least = (less.share + share) / 2, most = std::min({2 * share, (share + more.share) / 2, bound});
  if (std::none_of(samples.begin(), samples.end(),
                   [&](const Sample& each) { return each.helped_share >= least && each.helped_share <= most; }))
    return std::nullopt;
  const Sample found = middle(samples, least, most);
  const Helped& end  = found.helped_share <= share ? less : more;  // the sample is on the line to this end
  const double part = (found.helped_share - end.share) / (share - end.share), speed = 1 / found.seconds;
  return 1 / std::max((speed - (1 - part) / end.seconds) / part, 0.5 * speed);
}

}  // namespace stepgraph::trials
