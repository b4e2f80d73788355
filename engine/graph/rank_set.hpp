#pragma once
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/graph/rank_list.hpp"

namespace stepgraph {

// Some ranks of a world in ascending order, or all of them. All ranks take no memory.
class RankSet {
 public:
  RankSet(Rank only) : ranks_{only}, size_(1) {}  // NOLINT: one rank is a set of ranks
  explicit RankSet(std::vector<Rank> ranks);      // in any order; throws if there is none, or one of them twice
  [[nodiscard]] static RankSet all(int num_ranks) { return RankSet(num_ranks); }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] Rank operator[](std::size_t place) const noexcept {
    return ranks_.empty() ? Rank{static_cast<int>(place)} : ranks_[place];
  }
  // Its index in the set.
  [[nodiscard]] std::optional<std::size_t> place(Rank rank) const noexcept {
    if (ranks_.empty()) {
      if (index(rank) < 0 || static_cast<std::size_t>(index(rank)) >= size_) return std::nullopt;
      return static_cast<std::size_t>(index(rank));
    }
    const auto at = std::lower_bound(ranks_.begin(), ranks_.end(), rank);
    if (at == ranks_.end() || *at != rank) return std::nullopt;
    return static_cast<std::size_t>(at - ranks_.begin());
  }
  [[nodiscard]] bool contains(Rank rank) const noexcept { return place(rank).has_value(); }
  [[nodiscard]] bool contains(const RankSet& other) const noexcept;
  // How many of the ranks are in the set.
  [[nodiscard]] std::size_t num_in(const RankList& ranks) const;

  class Iterator {
   public:
    using difference_type = std::ptrdiff_t;
    using value_type      = Rank;
    Iterator()            = default;
    Iterator(const RankSet* set, std::size_t place) : set_(set), place_(place) {}
    Rank operator*() const noexcept { return (*set_)[place_]; }
    Iterator& operator++() noexcept { return ++place_, *this; }
    Iterator operator++(int) noexcept { return {set_, place_++}; }
    friend bool operator==(const Iterator& a, const Iterator& b) noexcept { return a.place_ == b.place_; }

   private:
    const RankSet* set_ = nullptr;
    std::size_t place_  = 0;
  };
  [[nodiscard]] Iterator begin() const noexcept { return {this, 0}; }
  [[nodiscard]] Iterator end() const noexcept { return {this, size_}; }

  friend bool operator==(const RankSet& a, const RankSet& b) noexcept {
    return a.size_ == b.size_ && std::equal(a.begin(), a.end(), b.begin());
  }

 private:
  explicit RankSet(int num_ranks) : size_(static_cast<std::size_t>(num_ranks)) {}

  std::vector<Rank> ranks_;  // empty: ranks 0 to size - 1
  std::size_t size_;
};

// "rank 3", "ranks 0, 2 and 5", "ranks 0 to 7": for messages.
[[nodiscard]] std::string to_string(const RankSet& ranks);

}  // namespace stepgraph
