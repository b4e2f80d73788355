#include "graphs/plan/plan.hpp"

#include <array>

namespace stepgraph {

std::string_view to_string(Recompute kind) noexcept {
  constexpr std::array<std::string_view, 4> names{"none", "selective", "full", "auto"};
  return names[static_cast<std::size_t>(kind)];
}

namespace {

// Backtracks to the last * only: a later * can match all that an earlier one could have.
bool matches(std::string_view pattern, std::string_view name) noexcept {
  std::size_t p = 0, n = 0, star = pattern.npos, from = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      from = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != pattern.npos) {
      p = star + 1;
      n = ++from;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == pattern.npos;
}

}  // namespace

int group_of(const std::vector<OptimizerGroup>& groups, std::string_view tensor) noexcept {
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (matches(groups[i].match, tensor)) return static_cast<int>(i) + 1;
  }
  return 0;
}

std::string_view to_string(OptimizerKind kind) noexcept { return kind == OptimizerKind::adamw ? "adamw" : "sgd"; }

std::vector<double> rates_of(const OptimizerPlan& optimizer, double rate) {
  std::vector<double> rates{rate};
  for (const OptimizerGroup& group : optimizer.groups) {
    const bool has_ratio = group.lr && optimizer.lr > 0;
    rates.push_back(has_ratio ? *group.lr * (rate / optimizer.lr) : group.lr.value_or(rate));
  }
  return rates;
}

}  // namespace stepgraph
