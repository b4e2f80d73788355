#pragma once
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace stepgraph {

// The numbers from 0 to size - 1, each in a set of its own until sets are joined (union-find with path halving).
class DisjointSets {
 public:
  explicit DisjointSets(std::size_t size) : parent_(size) { std::iota(parent_.begin(), parent_.end(), 0u); }

  void join(std::uint32_t a, std::uint32_t b) { parent_[find(a)] = find(b); }
  // The number that stands for the set of `a`, until the set is joined to another one.
  [[nodiscard]] std::uint32_t find(std::uint32_t a) {
    while (parent_[a] != a) a = parent_[a] = parent_[parent_[a]];
    return a;
  }
  // find() of every number.
  [[nodiscard]] std::vector<std::uint32_t> roots() && {
    for (std::uint32_t i = 0; i < parent_.size(); ++i) parent_[i] = find(i);
    return std::move(parent_);
  }

 private:
  std::vector<std::uint32_t> parent_;
};

}  // namespace stepgraph
