#include "engine/base/nearest.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace stepgraph {
namespace {

constexpr std::size_t longest = 128;  // longer texts are no typing errors, and comparing them takes long

char small(char letter) { return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter; }

std::size_t distance(std::string_view a, std::string_view b) {
  const auto same = [](char left, char right) { return small(left) == small(right); };
  std::vector<std::size_t> before, last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1)});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]))
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = std::exchange(last, row);
  }
  return last.back();
}

}  // namespace

std::vector<std::string_view> nearest_names(std::string_view given, std::span<const std::string_view> names,
                                            std::size_t most) {
  if (given.size() > longest) return {};
  const std::size_t farthest = std::max<std::size_t>(1, given.size() / 3);
  std::vector<std::pair<std::size_t, std::string_view>> near;
  for (const std::string_view name : names) {
    if (name.size() > longest) continue;
    const std::size_t steps = distance(given, name);
    if (steps <= farthest && steps < name.size()) near.emplace_back(steps, name);
  }
  std::stable_sort(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string_view> nearest;
  for (std::size_t i = 0; i < std::min(most, near.size()); ++i) nearest.push_back(near[i].second);
  return nearest;
}

std::string did_you_mean(std::string_view given, std::span<const std::string_view> names) {
  const std::vector<std::string_view> nearest = nearest_names(given, names);
  return nearest.empty() ? std::string() : "did you mean " + std::string(nearest.front()) + "? ";
}

}  // namespace stepgraph
