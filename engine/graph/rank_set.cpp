#include "engine/graph/rank_set.hpp"

#include "engine/base/error.hpp"

namespace stepgraph {

RankSet::RankSet(std::vector<Rank> ranks) : ranks_(std::move(ranks)), size_(ranks_.size()) {
  if (ranks_.empty()) throw Error(ErrorKind::config, "ranks: none are given (at least one)");
  std::sort(ranks_.begin(), ranks_.end());
  if (index(ranks_.front()) < 0) throw Error(ErrorKind::config, str("ranks: ", ranks_.front(), " (at least 0)"));
  const auto twice = std::adjacent_find(ranks_.begin(), ranks_.end());
  if (twice != ranks_.end()) throw Error(ErrorKind::config, str("ranks: rank ", *twice, " is given twice"));
}

bool RankSet::contains(const RankSet& other) const noexcept {
  if (other.ranks_.empty() && ranks_.empty()) return other.size_ <= size_;
  return std::all_of(other.begin(), other.end(), [&](Rank rank) { return contains(rank); });
}

std::string to_string(const RankSet& ranks) {
  const std::size_t n = ranks.size();
  if (n == 1) return str("rank ", ranks[0]);
  if (index(ranks[n - 1]) - index(ranks[0]) + 1 == static_cast<int>(n) && n > 2)
    return str("ranks ", ranks[0], " to ", ranks[n - 1]);
  constexpr std::size_t most = 8;
  std::string text           = "ranks ";
  for (std::size_t i = 0; i < std::min(n, most); ++i) text += str(i == 0 ? "" : i + 1 == n ? " and " : ", ", ranks[i]);
  return n > most ? str(text, " and ", n - most, " more") : text;
}

// Of the set and the list, the shorter one is walked.
std::size_t RankSet::num_in(const RankList& ranks) const {
  if (ranks_.empty() && !ranks.empty() && ranks.is_mesh() && contains(ranks.front()) && contains(ranks.back()))
    return ranks.size();
  const auto count = [](const auto& all, const auto& is_there) {
    return static_cast<std::size_t>(std::count_if(all.begin(), all.end(), is_there));
  };
  if (size_ < ranks.size()) return count(*this, [&](Rank rank) { return ranks.contains(rank); });
  return count(ranks, [&](Rank rank) { return contains(rank); });
}

}  // namespace stepgraph
