#include "engine/plan/skyline.hpp"

#include <algorithm>
#include <compare>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>

namespace stepgraph {
namespace {

constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();

struct Weight {
  double main, then;
  friend auto operator<=>(const Weight&, const Weight&) = default;
};
Weight weigh(const PackItem& item, SkylinePreference preference) {
  const double length = item.last - item.first + 1.0, size = static_cast<double>(item.size);
  if (preference == SkylinePreference::long_lived) return {length, size};
  if (preference == SkylinePreference::large) return {size, length};
  return {size * length, size};
}

// The items, most preferred first; equal ones by their first turn.
std::vector<std::uint32_t> by_preference(const std::vector<PackItem>& items, SkylinePreference preference) {
  struct Weighed {
    Weight weight;
    std::uint32_t first, item;
  };
  std::vector<Weighed> all;
  all.reserve(items.size());
  for (std::uint32_t i = 0; i < items.size(); ++i) all.push_back({weigh(items[i], preference), items[i].first, i});
  std::sort(all.begin(), all.end(), [](const Weighed& a, const Weighed& b) {
    if (a.weight != b.weight) return a.weight > b.weight;
    return a.first != b.first ? a.first < b.first : a.item < b.item;
  });
  std::vector<std::uint32_t> order;
  order.reserve(items.size());
  for (const Weighed& each : all) order.push_back(each.item);
  return order;
}

// The items that are not placed yet, as points (first, last) in a k-d tree. Finds the most preferred one that lives
// within given turns.
class Unplaced {
 public:
  Unplaced(const std::vector<PackItem>& items, std::vector<std::uint32_t> by_preference)
      : item_(std::move(by_preference)), points_(items.size()), place_(items.size()), trees_(items.size()) {
    std::iota(points_.begin(), points_.end(), 0u);
    lives_.reserve(items.size());
    for (const std::uint32_t item : item_) lives_.push_back({items[item].first, items[item].last});
    if (!points_.empty()) build(0, points_.size(), true);
  }
  [[nodiscard]] bool empty() const { return num_removed_ == item_.size(); }

  // Removes and returns the most preferred item with first >= begin and last < end; none: there is none.
  std::uint32_t take_within(std::uint32_t begin, std::uint32_t end) {
    std::uint32_t best = none;
    find(0, points_.size(), begin, end, best);
    if (best == none) return none;
    remove(0, points_.size(), place_[best]);
    ++num_removed_;
    return item_[best];
  }

 private:
  // The tree of points [low, high) has its root in the middle, and the two halves beside it are its subtrees.
  struct Life {
    std::uint32_t first, last;
  };
  struct Tree {
    Life root;
    std::uint32_t min_first, max_first, min_last, max_last;
    std::uint32_t best;  // the lowest number of a point that is still there
    bool root_removed = false;
  };
  // Points are numbered by preference: 0 is the most preferred.
  [[nodiscard]] std::uint32_t best(std::size_t low, std::size_t high) const {
    return low < high ? trees_[(low + high) / 2].best : none;
  }
  void choose_best(std::size_t low, std::size_t high) {
    const std::size_t middle = (low + high) / 2;
    Tree& tree               = trees_[middle];
    tree.best = std::min({tree.root_removed ? none : points_[middle], best(low, middle), best(middle + 1, high)});
  }

  void build(std::size_t low, std::size_t high, bool by_first) {
    const std::size_t middle = (low + high) / 2;
    const auto at            = [&](std::size_t i) { return points_.begin() + static_cast<std::ptrdiff_t>(i); };
    std::nth_element(at(low), at(middle), at(high), [&](std::uint32_t a, std::uint32_t b) {
      const std::uint32_t x = by_first ? lives_[a].first : lives_[a].last;
      const std::uint32_t y = by_first ? lives_[b].first : lives_[b].last;
      return x != y ? x < y : a < b;
    });
    const Life root         = lives_[points_[middle]];
    place_[points_[middle]] = middle;
    Tree tree{root, root.first, root.first, root.last, root.last, none};
    for (const auto& [begin, end] : {std::pair(low, middle), std::pair(middle + 1, high)}) {
      if (begin == end) continue;
      build(begin, end, !by_first);
      const Tree& part = trees_[(begin + end) / 2];
      tree.min_first   = std::min(tree.min_first, part.min_first);
      tree.max_first   = std::max(tree.max_first, part.max_first);
      tree.min_last    = std::min(tree.min_last, part.min_last);
      tree.max_last    = std::max(tree.max_last, part.max_last);
    }
    trees_[middle] = tree;
    choose_best(low, high);
  }

  void find(std::size_t low, std::size_t high, std::uint32_t begin, std::uint32_t end, std::uint32_t& found) const {
    if (low == high) return;
    const std::size_t middle = (low + high) / 2;
    const Tree& tree         = trees_[middle];
    if (tree.best >= found || tree.max_first < begin || tree.min_last >= end) return;
    if (tree.min_first >= begin && tree.max_last < end) {
      found = tree.best;
      return;
    }
    if (!tree.root_removed && tree.root.first >= begin && tree.root.last < end)
      found = std::min(found, points_[middle]);
    const bool right_first = best(middle + 1, high) < best(low, middle);
    if (right_first) find(middle + 1, high, begin, end, found);
    find(low, middle, begin, end, found);
    if (!right_first) find(middle + 1, high, begin, end, found);
  }

  void remove(std::size_t low, std::size_t high, std::size_t place) {
    const std::size_t middle = (low + high) / 2;
    if (place == middle) {
      trees_[middle].root_removed = true;
    } else if (place < middle) {
      remove(low, middle, place);
    } else {
      remove(middle + 1, high, place);
    }
    choose_best(low, high);
  }

  std::vector<std::uint32_t> item_;    // by point
  std::vector<Life> lives_;            // by point
  std::vector<std::uint32_t> points_;  // by place in the tree
  std::vector<std::size_t> place_;     // by point
  std::vector<Tree> trees_;            // by place of the root
  std::size_t num_removed_ = 0;
};

// The heights above stretches of turns. The stretches meet, so that the neighbours of one are found by its two ends.
class Skyline {
 public:
  struct Step {
    std::uint32_t begin, end;
    std::int64_t height;
  };

  explicit Skyline(std::uint32_t end) : steps_(end), begins_(std::size_t{end} + 1, none) { add({0, end, 0}); }

  // The first of equal ones.
  [[nodiscard]] const Step& lowest() {
    while (!is_now(by_height_.top())) by_height_.pop();
    return steps_[by_height_.top().begin];
  }

  // Raises the lowest step to its lower neighbour.
  void lift() {
    Step step = lowest();
    remove(step);
    std::int64_t lower = std::numeric_limits<std::int64_t>::max();
    if (step.begin > 0) lower = std::min(lower, steps_[begins_[step.begin]].height);
    if (step.end < steps_.size()) lower = std::min(lower, steps_[step.end].height);
    step.height = lower;
    merge(step);
  }

  // Puts an item on the lowest step.
  void cover(const PackItem& item) {
    const Step step = lowest();
    if (item.size == 0) return;
    remove(step);
    if (step.begin < item.first) add({step.begin, item.first, step.height});
    if (item.last + 1 < step.end) add({item.last + 1, step.end, step.height});
    merge({item.first, item.last + 1, step.height + item.size});
  }

 private:
  struct Entry {
    std::int64_t height;
    std::uint32_t begin;
    friend auto operator<=>(const Entry&, const Entry&) = default;
  };
  [[nodiscard]] bool is_now(const Entry& entry) const {
    const Step& step = steps_[entry.begin];
    return begins_[step.end] == entry.begin && step.height == entry.height;
  }

  void add(const Step& step) {
    steps_[step.begin] = step;
    begins_[step.end]  = step.begin;
    by_height_.push({step.height, step.begin});
  }
  void remove(const Step& step) { begins_[step.end] = none; }
  // Adds a step, as one with neighbours of the same height.
  void merge(Step step) {
    if (step.end < steps_.size() && steps_[step.end].height == step.height) {
      const Step right = steps_[step.end];
      remove(right);
      step.end = right.end;
    }
    if (step.begin > 0 && steps_[begins_[step.begin]].height == step.height) {
      const Step left = steps_[begins_[step.begin]];
      remove(left);
      step.begin = left.begin;
    }
    add(step);
  }

  std::vector<Step> steps_;            // by begin; those that begins_ has are there
  std::vector<std::uint32_t> begins_;  // by the end of a step
  // The lowest on top. Steps that are no more, or have another height now, are dropped when they come to the top.
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> by_height_;
};

}  // namespace

Packing pack_by_skyline(const std::vector<PackItem>& items, SkylinePreference preference) {
  Packing out{std::vector<std::int64_t>(items.size(), 0), 0};
  if (items.empty()) return out;
  std::uint32_t end = 0;
  for (const PackItem& item : items) end = std::max(end, item.last + 1);
  Unplaced unplaced(items, by_preference(items, preference));
  Skyline skyline(end);
  while (!unplaced.empty()) {
    const Skyline::Step& lowest = skyline.lowest();
    const std::uint32_t item    = unplaced.take_within(lowest.begin, lowest.end);
    if (item == none) {
      skyline.lift();
      continue;
    }
    out.offsets[item] = lowest.height;
    out.size          = std::max(out.size, out.offsets[item] + items[item].size);
    skyline.cover(items[item]);
  }
  return out;
}

}  // namespace stepgraph
