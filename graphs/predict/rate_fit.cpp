#include "graphs/predict/rate_fit.hpp"

#include <algorithm>
#include <vector>

#include "engine/base/quantile.hpp"

namespace stepgraph::trials {
namespace {

constexpr double little = 0.2, far_apart = 0.3, nearby = 0.15;  // of shares

bool helped_less(const Sample& a, const Sample& b) { return a.helped_share < b.helped_share; }

// What samples with shares from `least` to `most` have in common. There is at least one.
Sample middle(std::span<const Sample> samples, double least, double most) {
  std::vector<double> shares, seconds;
  for (const Sample& sample : samples) {
    if (sample.helped_share < least || sample.helped_share > most) continue;
    shares.push_back(sample.helped_share);
    seconds.push_back(sample.seconds);
  }
  return {quantile(shares, 0.5), quantile(seconds, undisturbed)};
}

}  // namespace

std::optional<BothTimes> both_times(std::span<const Sample> samples) {
  if (samples.empty()) return std::nullopt;
  const auto [least, most] = std::minmax_element(samples.begin(), samples.end(), helped_less);
  if (least->helped_share > little || most->helped_share - least->helped_share < far_apart) return std::nullopt;
  const Sample busy  = middle(samples, least->helped_share, least->helped_share + nearby);
  const Sample alone = middle(samples, most->helped_share - nearby, most->helped_share);
  const double slope = (1 / alone.seconds - 1 / busy.seconds) / (alone.helped_share - busy.helped_share);
  const auto seconds = [&](double share) {  // the speed is kept above 0
    return 1 / std::max(1 / busy.seconds + slope * (share - busy.helped_share),
                        0.5 / std::max(busy.seconds, alone.seconds));
  };
  return BothTimes{seconds(0), seconds(1)};
}

BothTimes both_times(std::span<const Sample> samples, double ratio) {
  const double most    = std::max_element(samples.begin(), samples.end(), helped_less)->helped_share;
  const Sample highest = middle(samples, most - nearby, most);
  const double alone_s = highest.seconds * (highest.helped_share + (1 - highest.helped_share) / ratio);
  return {alone_s * ratio, alone_s};
}

}  // namespace stepgraph::trials
