#include "engine/plan/packing.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

namespace stepgraph {
namespace {

constexpr int patience = 150;  // consecutive tries without improvement before a search stops

using MayShare = std::function<bool(std::uint32_t, std::uint32_t)>;

bool overlap(const PackItem& a, const PackItem& b) { return a.first <= b.last && b.first <= a.last; }

std::vector<std::uint32_t> by_first(const std::vector<PackItem>& items) {
  std::vector<std::uint32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return items[a].first < items[b].first; });
  return order;
}

// Pairs of items that must not share a byte, as compressed rows. `known` is false if there were more pairs than
// allowed.
struct Conflicts {
  std::vector<std::size_t> begin;
  std::vector<std::uint32_t> items;
  bool known = false;
  [[nodiscard]] std::size_t size() const noexcept { return items.size(); }
};

Conflicts find_conflicts(const std::vector<PackItem>& items, std::int64_t effort, const MayShare& may_share) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;
  std::vector<std::uint32_t> alive;  // items that have begun and, without may_share, have not ended
  std::int64_t looked_at = 0;
  for (const std::uint32_t item : by_first(items)) {
    if (!may_share) std::erase_if(alive, [&](std::uint32_t other) { return items[other].last < items[item].first; });
    looked_at += std::ssize(alive);
    if (looked_at > effort) return {};
    for (const std::uint32_t other : alive) {
      if (overlap(items[other], items[item]) || (may_share && !may_share(other, item))) pairs.emplace_back(other, item);
    }
    alive.push_back(item);
  }
  Conflicts out;
  out.known = true;
  out.begin.assign(items.size() + 1, 0);
  for (const auto& [a, b] : pairs) ++out.begin[a + 1], ++out.begin[b + 1];
  for (std::size_t i = 0; i < items.size(); ++i) out.begin[i + 1] += out.begin[i];
  out.items.resize(2 * pairs.size());
  std::vector<std::size_t> next(out.begin.begin(), out.begin.end() - 1);
  for (const auto& [a, b] : pairs) {
    out.items[next[a]++] = b;
    out.items[next[b]++] = a;
  }
  return out;
}

// Places items one after another, each at the lowest offset that the items already placed allow.
class Greedy {
 public:
  Greedy(const std::vector<PackItem>& items, const Conflicts& conflicts) : items_(items), conflicts_(conflicts) {}

  // Stops once the size exceeds `at_most`; the remaining items are then not placed.
  Packing place(const std::vector<std::uint32_t>& order,
                std::int64_t at_most = std::numeric_limits<std::int64_t>::max()) {
    constexpr std::int64_t unplaced = -1;
    Packing out{std::vector<std::int64_t>(items_.size(), unplaced), 0};
    for (const std::uint32_t item : order) {
      taken_.clear();
      for (std::size_t i = conflicts_.begin[item]; i < conflicts_.begin[item + 1]; ++i) {
        const std::uint32_t other = conflicts_.items[i];
        if (out.offsets[other] != unplaced)
          taken_.emplace_back(out.offsets[other], out.offsets[other] + items_[other].size);
      }
      std::sort(taken_.begin(), taken_.end());
      std::int64_t offset = 0;
      for (const auto& [begin, end] : taken_) {
        if (begin - offset >= items_[item].size) break;
        offset = std::max(offset, end);
      }
      out.offsets[item] = offset;
      out.size          = std::max(out.size, offset + items_[item].size);
      if (out.size > at_most) break;
    }
    return out;
  }

 private:
  const std::vector<PackItem>& items_;
  const Conflicts& conflicts_;
  std::vector<std::pair<std::int64_t, std::int64_t>> taken_;
};

void keep_better(Packing& best, Packing&& other) {
  if (best.offsets.empty() || other.size < best.size) best = std::move(other);
}

// Fills from the bottom: finds the lowest stretch of turns and puts there the item that the preference ranks highest.
// If no item fits, the stretch is raised to its lower neighbour. (Burke's best-fit heuristic for strip packing, with
// fixed places in time.)
class Skyline {
 public:
  enum class Prefer { long_lived, large, both };
  Skyline(const std::vector<PackItem>& items, Prefer prefer) : items_(items), prefer_(prefer) {}

  Packing place() {
    Packing out{std::vector<std::int64_t>(items_.size(), 0), 0};
    std::uint32_t end = 0;
    for (const PackItem& item : items_) end = std::max(end, item.last + 1);
    left_ = by_first(items_);
    steps_.emplace(0u, Step{end, 0});
    while (!left_.empty()) {
      const auto lowest = std::min_element(
          steps_.begin(), steps_.end(), [](const auto& a, const auto& b) { return a.second.height < b.second.height; });
      const auto found = best_within(lowest->first, lowest->second.end);
      if (found == left_.end()) {
        lift(lowest);
        continue;
      }
      const std::uint32_t item = *found;
      left_.erase(found);
      out.offsets[item] = lowest->second.height;
      out.size          = std::max(out.size, out.offsets[item] + items_[item].size);
      cover(lowest, items_[item]);
    }
    return out;
  }

 private:
  struct Step {
    std::uint32_t end;
    std::int64_t height;
  };
  using Steps = std::map<std::uint32_t, Step>;  // by begin

  std::vector<std::uint32_t>::iterator best_within(std::uint32_t begin, std::uint32_t end) {
    auto best = left_.end();
    auto at   = std::lower_bound(left_.begin(), left_.end(), begin,
                                 [&](std::uint32_t item, std::uint32_t turn) { return items_[item].first < turn; });
    for (; at != left_.end() && items_[*at].first < end; ++at) {
      if (items_[*at].last >= end) continue;
      if (best == left_.end() || weight(*at) > weight(*best)) best = at;
    }
    return best;
  }

  struct Weight {
    double main, then;
    friend auto operator<=>(const Weight&, const Weight&) = default;
  };
  [[nodiscard]] Weight weight(std::uint32_t item) const {
    const double length = items_[item].last - items_[item].first + 1.0, size = static_cast<double>(items_[item].size);
    if (prefer_ == Prefer::long_lived) return {length, size};
    if (prefer_ == Prefer::large) return {size, length};
    return {size * length, size};
  }

  void lift(Steps::iterator step) {
    const bool has_left = step != steps_.begin(), has_right = std::next(step) != steps_.end();
    const std::int64_t left  = has_left ? std::prev(step)->second.height : 0;
    const std::int64_t right = has_right ? std::next(step)->second.height : 0;
    step->second.height      = !has_left ? right : !has_right ? left : std::min(left, right);
    merge(step);
  }

  void merge(Steps::iterator step) {
    if (std::next(step) != steps_.end() && std::next(step)->second.height == step->second.height) {
      step->second.end = std::next(step)->second.end;
      steps_.erase(std::next(step));
    }
    if (step != steps_.begin() && std::prev(step)->second.height == step->second.height) {
      std::prev(step)->second.end = step->second.end;
      steps_.erase(step);
    }
  }

  void cover(Steps::iterator step, const PackItem& item) {
    const std::uint32_t begin = step->first, end = step->second.end;
    const std::int64_t height = step->second.height;
    if (item.size == 0) return;
    steps_.erase(step);
    if (begin < item.first) steps_.emplace(begin, Step{item.first, height});
    if (item.last + 1 < end) steps_.emplace(item.last + 1, Step{end, height});
    merge(steps_.emplace(item.first, Step{item.last + 1, height + item.size}).first);
  }

  const std::vector<PackItem>& items_;
  Prefer prefer_;
  std::vector<std::uint32_t> left_;  // not placed yet, by first turn
  Steps steps_;
};

// Greedy placement in several orders. While effort is left, items that reach the top move to the front and all are
// placed again.
Packing search(const std::vector<PackItem>& items, const Conflicts& conflicts, std::int64_t lower_bound,
               std::int64_t effort) {
  Greedy greedy(items, conflicts);
  std::vector<std::vector<std::uint32_t>> orders(4, by_first(items));
  const auto length = [&](std::uint32_t i) { return static_cast<std::int64_t>(items[i].last - items[i].first) + 1; };
  std::stable_sort(orders[1].begin(), orders[1].end(), [&](auto a, auto b) { return items[a].size > items[b].size; });
  std::stable_sort(orders[2].begin(), orders[2].end(), [&](auto a, auto b) { return length(a) > length(b); });
  std::stable_sort(orders[3].begin(), orders[3].end(), [&](auto a, auto b) {
    return static_cast<double>(items[a].size) * static_cast<double>(length(a)) >
           static_cast<double>(items[b].size) * static_cast<double>(length(b));
  });
  Packing best;
  std::int64_t cost = static_cast<std::int64_t>(conflicts.size() + items.size()) + 1;
  for (std::vector<std::uint32_t>& order : orders) {
    Packing found = greedy.place(order);
    effort -= cost;
    Packing now = found;
    keep_better(best, std::move(found));
    // The four orders share the effort that is left.
    std::int64_t left = effort / 4;
    for (int idle = 0; left > 0 && idle < patience && best.size > lower_bound; left -= cost, effort -= cost) {
      const auto on_top = [&](std::uint32_t i) { return now.offsets[i] + items[i].size == now.size; };
      if (std::stable_partition(order.begin(), order.end(), on_top) == order.end()) break;
      now  = greedy.place(order);
      idle = now.size < best.size ? 0 : idle + 1;
      keep_better(best, Packing(now));
    }
    if (best.size <= lower_bound) break;
  }
  return best;
}

// Starts from a packing and places the items again from the lowest up. Items that reach the top move to a random
// place earlier in that sequence; a move is kept unless the packing grows.
Packing improve(const std::vector<PackItem>& items, const Conflicts& conflicts, Packing best, std::int64_t lower_bound,
                std::int64_t effort) {
  Greedy greedy(items, conflicts);
  std::vector<std::uint32_t> order(items.size()), trial;
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return best.offsets[a] < best.offsets[b]; });
  Packing now             = greedy.place(order);
  std::uint64_t draw      = 88172645463325252u;  // xorshift with a fixed seed: the same numbers on every machine
  const std::int64_t cost = static_cast<std::int64_t>(conflicts.size() + items.size()) + 1;
  for (int idle = 0; effort > 0 && idle < 4 * patience && best.size > lower_bound; effort -= cost, ++idle) {
    trial = order;
    for (std::size_t i = 1; i < trial.size(); ++i) {
      if (now.offsets[trial[i]] + items[trial[i]].size != now.size) continue;
      draw ^= draw << 13, draw ^= draw >> 7, draw ^= draw << 17;
      const auto at = trial.begin() + static_cast<std::ptrdiff_t>(i);
      std::rotate(trial.begin() + static_cast<std::ptrdiff_t>(draw % i), at, at + 1);
    }
    Packing next = greedy.place(trial, now.size);
    if (next.size > now.size) continue;
    order.swap(trial);
    now = std::move(next);
    if (now.size >= best.size) continue;
    best = now;
    idle = 0;
  }
  return best;
}

// Walks along the order like an allocator: each item goes into the smallest hole that fits. Near-linear, for very many
// items.
class Sweep {
 public:
  explicit Sweep(const std::vector<PackItem>& items) : items_(items) {}

  Packing place() {
    Packing out{std::vector<std::int64_t>(items_.size(), 0), 0};
    std::multimap<std::uint32_t, std::uint32_t> ends;  // last turn -> item
    for (const std::uint32_t item : by_first(items_)) {
      while (!ends.empty() && ends.begin()->first < items_[item].first) {
        const std::uint32_t over = ends.begin()->second;
        release(out.offsets[over], items_[over].size);
        ends.erase(ends.begin());
      }
      out.offsets[item] = take(items_[item].size);
      ends.emplace(items_[item].last, item);
    }
    out.size = end_;
    return out;
  }

 private:
  std::int64_t take(std::int64_t size) {
    if (size == 0) return 0;
    const auto fit = by_size_.lower_bound({size, 0});
    if (fit != by_size_.end()) {
      const auto [hole, offset] = *fit;
      erase(offset, hole);
      if (hole > size) insert(offset + size, hole - size);
      return offset;
    }
    std::int64_t offset = end_;
    if (!holes_.empty() && holes_.rbegin()->first + holes_.rbegin()->second == end_) {  // extend the hole at the end
      offset = holes_.rbegin()->first;
      erase(offset, holes_.rbegin()->second);
    }
    end_ = offset + size;
    return offset;
  }

  void release(std::int64_t offset, std::int64_t size) {
    if (size == 0) return;
    auto after = holes_.lower_bound(offset);
    if (after != holes_.end() && after->first == offset + size) {
      size += after->second;
      erase(after->first, after->second);
      after = holes_.lower_bound(offset);
    }
    if (after != holes_.begin() && std::prev(after)->first + std::prev(after)->second == offset) {
      const auto before = *std::prev(after);
      offset            = before.first;
      size += before.second;
      erase(before.first, before.second);
    }
    insert(offset, size);
  }

  void insert(std::int64_t offset, std::int64_t size) {
    holes_.emplace(offset, size);
    by_size_.emplace(size, offset);
  }
  void erase(std::int64_t offset, std::int64_t size) {
    holes_.erase(offset);
    by_size_.erase({size, offset});
  }

  const std::vector<PackItem>& items_;
  std::int64_t end_ = 0;
  std::map<std::int64_t, std::int64_t> holes_;  // offset -> size
  std::set<std::pair<std::int64_t, std::int64_t>> by_size_;
};

}  // namespace

std::int64_t most_at_once(const std::vector<PackItem>& items) {
  std::vector<std::tuple<std::int64_t, bool, std::int64_t>> changes;  // turn, begins, bytes
  for (const PackItem& item : items) {
    changes.emplace_back(item.first, true, item.size);
    changes.emplace_back(std::int64_t{item.last} + 1, false, -item.size);
  }
  std::sort(changes.begin(), changes.end());  // at one turn, ends sort before begins
  std::int64_t now = 0, most = 0;
  for (const auto& [turn, begins, bytes] : changes) most = std::max(most, now += bytes);
  return most;
}

Packing pack(const std::vector<PackItem>& items, std::int64_t effort) {
  Packing best                   = Sweep(items).place();
  const std::int64_t lower_bound = most_at_once(items);
  if (best.size <= lower_bound) return best;
  const bool few = std::ssize(items) * std::ssize(items) / 32 <= effort;  // Skyline is quadratic in the number of items
  for (const auto prefer : {Skyline::Prefer::long_lived, Skyline::Prefer::large, Skyline::Prefer::both}) {
    if (few && best.size > lower_bound) keep_better(best, Skyline(items, prefer).place());
  }
  if (best.size <= lower_bound) return best;
  const Conflicts conflicts = find_conflicts(items, effort, {});
  if (!conflicts.known) return best;
  keep_better(best, search(items, conflicts, lower_bound, effort / 2));
  return improve(items, conflicts, std::move(best), lower_bound, effort / 2);
}

Packing pack(const std::vector<PackItem>& items, std::int64_t effort, const MayShare& may_share,
             const std::vector<std::uint32_t>& free_from) {
  // Extends each item's lifetime until every later item may use its bytes. The items then pack like any others.
  std::vector<PackItem> longer = items;
  std::uint32_t end            = 0;
  for (const PackItem& item : items) end = std::max(end, item.last);
  for (std::size_t i = 0; i < items.size(); ++i)
    longer[i].last = std::max(items[i].last, std::min(free_from[i] - 1, end));
  Packing best              = pack(longer, effort);
  const Conflicts conflicts = find_conflicts(items, effort, may_share);
  if (conflicts.known) keep_better(best, search(items, conflicts, most_at_once(items), effort / 4));
  return best;
}

}  // namespace stepgraph
