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
constexpr double few_helpers = 0.5, some_helpers = 2;  // about one is between them

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
  seconds.resize(seconds.size() - (seconds.size() + 7) / 10);
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

double paired_on_line(const BothTimes& times, int others) {
  return 1 / (1 / times.busy_s + (1 / times.alone_s - 1 / times.busy_s) / others);
}

std::optional<double> paired_seconds(std::span<const Sample> samples, const BothTimes& times, int others) {
  const double least = few_helpers / others, most = std::min(some_helpers, (1.0 + others) / 2) / others;
  if (std::none_of(samples.begin(), samples.end(),
                   [&](const Sample& each) { return each.helped_share >= least && each.helped_share <= most; }))
    return std::nullopt;
  const Sample found   = middle(samples, least, most);
  const double helpers = found.helped_share * others, speed = 1 / found.seconds;
  // On the line to no help, or to all.
  const double share  = helpers <= 1 ? helpers : (others - helpers) / (others - 1);
  const double paired = (speed - (1 - share) / (helpers <= 1 ? times.busy_s : times.alone_s)) / share;
  return 1 / std::max(paired, 0.5 * speed);
}

}  // namespace stepgraph::trials
