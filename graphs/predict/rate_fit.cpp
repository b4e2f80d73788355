#include "graphs/predict/rate_fit.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "engine/base/quantile.hpp"

namespace stepgraph::trials {
namespace {

constexpr double little = 0.2, far_apart = 0.35, nearby = 0.15;  // of shares
static_assert(far_apart > 2 * nearby);
constexpr double few_helpers = 0.5;

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

}  // namespace

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
                                      double share) {
  const double least = (less.share + share) / 2, most = std::min(2 * share, (share + more.share) / 2);
  if (std::none_of(samples.begin(), samples.end(),
                   [&](const Sample& each) { return each.helped_share >= least && each.helped_share <= most; }))
    return std::nullopt;
  const Sample found = middle(samples, least, most);
  const Helped& end  = found.helped_share <= share ? less : more;  // the sample is on the line to this end
  const double part = (found.helped_share - end.share) / (share - end.share), speed = 1 / found.seconds;
  return 1 / std::max((speed - (1 - part) / end.seconds) / part, 0.5 * speed);
}

bool had_all_help(std::span<const Sample> samples) {
  return std::any_of(samples.begin(), samples.end(), [](const Sample& each) { return each.helped_share > 1 - nearby; });
}

}  // namespace stepgraph::trials
