#include "engine/plan/packing.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "engine/plan/apart_bound.hpp"
#include "engine/plan/first_fit.hpp"
#include "engine/plan/skyline.hpp"

namespace stepgraph {
namespace {

using MayShare = std::function<bool(std::uint32_t, std::uint32_t)>;

void keep_better(Packing& best, Packing&& other) {
  if (!other.offsets.empty() && other.size < best.size) best = std::move(other);
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
  // Turns are numbered without large gaps (PackItem), so this table is about as long as the list of items.
  std::size_t end = 0;
  for (const PackItem& item : items) end = std::max(end, std::size_t{item.last} + 1);
  std::vector<std::int64_t> changes(end + 1, 0);
  for (const PackItem& item : items) {
    changes[item.first] += item.size;
    changes[std::size_t{item.last} + 1] -= item.size;
  }
  std::int64_t now = 0, most = 0;
  for (const std::int64_t change : changes) most = std::max(most, now += change);
  return most;
}

Packing pack(const std::vector<PackItem>& items, std::int64_t effort, const PackLimits& limits, PackWork* work) {
  PackWork done;
  const std::int64_t count = std::ssize(items), lower_bound = most_at_once(items);
  Packing best = Sweep(items).place();
  for (const auto preference : {SkylinePreference::long_lived, SkylinePreference::large, SkylinePreference::both}) {
    const bool some = done.num_skyline_items > 0;
    if (best.size <= lower_bound || (some && done.num_skyline_items + count > limits.skyline_items)) break;
    keep_better(best, pack_by_skyline(items, preference));
    done.num_skyline_items += count;
  }
  if (best.size > lower_bound) {
    FirstFit fit(items);
    const std::int64_t of_orders = std::max(effort / 2, limits.pairs_per_item * count);
    keep_better(best, search(items, fit, lower_bound, effort / 2, of_orders));
    // Only if the effort is enough to place all items at least once.
    if (best.size > lower_bound && count * (count - 1) / 2 <= effort / 2)
      best = improve(items, fit, std::move(best), lower_bound, effort / 2);
    done.num_pairs = fit.num_pairs();
  }
  if (work != nullptr) *work = done;
  return best;
}

Packing pack(const std::vector<PackItem>& items, std::int64_t effort, const MayShare& may_share,
             const std::vector<std::uint32_t>& free_from) {
  // Extends each item's lifetime until every later item may use its bytes. The items then pack like any others.
  std::vector<PackItem> longer = items;
  std::uint32_t end            = 0;
  for (const PackItem& item : items) end = std::max(end, item.last);
  for (std::size_t i = 0; i < items.size(); ++i)
    longer[i].last = std::max(items[i].last, std::min(free_from[i] - 1, end));
  Packing best                   = pack(longer, effort);
  const std::int64_t lower_bound = most_at_once(items);
  // Asking about a pair takes longer than comparing lifetimes.
  if (best.size <= lower_bound || std::ssize(items) * (std::ssize(items) - 1) / 2 > effort / 4) return best;
  ItemPairs apart(items.size());
  const std::vector<std::uint32_t> order = by_first(items);
  const auto at                          = [&](std::uint64_t turn) {  // the first item that begins at a turn or later
    return std::partition_point(order.begin(), order.end(), [&](std::uint32_t i) { return items[i].first < turn; });
  };
  for (const std::uint32_t earlier : order) {
    const auto shared = at(free_from[earlier]);  // all from there on may share
    for (auto later = at(std::uint64_t{items[earlier].last} + 1); later < shared; ++later) {
      if (!may_share(earlier, *later)) apart.add(earlier, *later);
    }
  }
  // A better bound than that of the lifetimes: the search ends where it is reached, because no packing is smaller.
  const std::int64_t bound = most_apart(items, apart);
  if (best.size <= bound) return best;
  FirstFit fit(items, &apart);
  keep_better(best, search(items, fit, bound, effort + effort / 2, effort));
  return best;
}

}  // namespace stepgraph
