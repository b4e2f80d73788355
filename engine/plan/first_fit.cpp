#include "engine/plan/first_fit.hpp"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

namespace stepgraph {
namespace {

constexpr int patience             = 30;  // consecutive tries without improvement before a search stops
constexpr std::size_t max_in_block = 64;
constexpr std::int64_t not_placed  = -1;

}  // namespace

void FirstFit::Block::note(const Placed& item) {
  first = std::min(first, item.first);
  last  = std::max(last, item.last);
}

std::int64_t FirstFit::lowest_gap(std::uint32_t item) {
  const PackItem& wanted = items_[item];
  std::int64_t offset    = 0;
  for (const Block& block : std::span(blocks_).first(num_blocks_)) {
    if (apart_ == nullptr && (block.first > wanted.last || block.last < wanted.first)) continue;
    num_pairs_ += std::ssize(block.items);
    for (const Placed& other : block.items) {
      const bool conflict = (other.first <= wanted.last && wanted.first <= other.last) ||
                            (apart_ != nullptr && apart_->has(item, other.item));
      if (!conflict) continue;
      if (other.begin - offset >= wanted.size) return offset;
      offset = std::max(offset, other.end);
    }
  }
  return offset;
}

void FirstFit::insert(const Placed& item) {
  if (num_blocks_ == 0) new_block(0);
  const auto end = blocks_.begin() + static_cast<std::ptrdiff_t>(num_blocks_);
  auto at        = std::partition_point(blocks_.begin(), end, [&](const Block& block) {
    return !block.items.empty() && block.items.back().begin <= item.begin;
  });
  if (at == end) --at;
  const auto behind = std::upper_bound(at->items.begin(), at->items.end(), item.begin,
                                       [](std::int64_t begin, const Placed& other) { return begin < other.begin; });
  at->items.insert(behind, item);
  at->note(item);
  if (at->items.size() > max_in_block) split(static_cast<std::size_t>(at - blocks_.begin()));
}

FirstFit::Block& FirstFit::new_block(std::size_t place) {
  if (num_blocks_ == blocks_.size()) blocks_.emplace_back().items.reserve(max_in_block + 1);
  const auto first = blocks_.begin() + static_cast<std::ptrdiff_t>(place);
  const auto last  = blocks_.begin() + static_cast<std::ptrdiff_t>(num_blocks_++);
  std::rotate(first, last, last + 1);
  *first = Block{std::move(first->items)};
  first->items.clear();
  return *first;
}

void FirstFit::split(std::size_t place) {
  Block& upper      = new_block(place + 1);
  Block& lower      = blocks_[place];
  const auto middle = lower.items.begin() + max_in_block / 2;
  upper.items.assign(middle, lower.items.end());
  lower.items.erase(middle, lower.items.end());
  lower = Block{std::move(lower.items)};
  for (Block* const block : {&lower, &upper}) {
    for (const Placed& each : block->items) block->note(each);
  }
}

Packing FirstFit::place(const std::vector<std::uint32_t>& order, std::int64_t at_most, std::int64_t max_pairs) {
  Packing out{std::vector<std::int64_t>(items_.size(), not_placed), 0};
  const std::int64_t began = num_pairs_;
  num_blocks_              = 0;
  for (const std::uint32_t item : order) {
    const PackItem& wanted    = items_[item];
    const std::int64_t offset = wanted.size == 0 ? 0 : lowest_gap(item);
    if (num_pairs_ - began > max_pairs) return {};
    out.offsets[item] = offset;
    out.size          = std::max(out.size, offset + wanted.size);
    if (out.size > at_most) break;
    if (wanted.size > 0) insert({offset, offset + wanted.size, wanted.first, wanted.last, item});
  }
  return out;
}

std::vector<std::uint32_t> by_first(const std::vector<PackItem>& items) {
  std::vector<std::uint32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return items[a].first < items[b].first; });
  return order;
}

Packing search(const std::vector<PackItem>& items, FirstFit& fit, std::int64_t lower_bound, std::int64_t effort,
               std::int64_t effort_of_orders) {
  std::vector<std::vector<std::uint32_t>> orders(4, by_first(items));
  const auto length = [&](std::uint32_t i) { return static_cast<std::int64_t>(items[i].last - items[i].first) + 1; };
  const auto area   = [&](std::uint32_t i) {
    return static_cast<double>(items[i].size) * static_cast<double>(length(i));
  };
  std::stable_sort(orders[1].begin(), orders[1].end(), [&](auto a, auto b) { return items[a].size > items[b].size; });
  std::stable_sort(orders[2].begin(), orders[2].end(), [&](auto a, auto b) { return length(a) > length(b); });
  std::stable_sort(orders[3].begin(), orders[3].end(), [&](auto a, auto b) { return area(a) > area(b); });
  // If there is no time for all, by size: that is most often the best one.
  if (2 * std::ssize(items) * std::ssize(items) > effort_of_orders) std::swap(orders[0], orders[1]);
  Packing best;
  for (std::vector<std::uint32_t>& order : orders) {
    const std::int64_t began = fit.num_pairs();
    Packing now              = fit.place(order, std::numeric_limits<std::int64_t>::max(), effort_of_orders);
    if (now.offsets.empty()) break;
    const std::int64_t cost = fit.num_pairs() - began;
    effort -= cost;
    effort_of_orders -= cost;
    if (best.offsets.empty() || now.size < best.size) best = now;
    // The four orders share the effort that is left.
    const std::int64_t until = fit.num_pairs() + effort / 4, before = fit.num_pairs();
    for (int idle = 0; fit.num_pairs() < until && idle < patience && best.size > lower_bound;) {
      const auto on_top = [&](std::uint32_t i) { return now.offsets[i] + items[i].size == now.size; };
      if (std::stable_partition(order.begin(), order.end(), on_top) == order.end()) break;
      now = fit.place(order, std::numeric_limits<std::int64_t>::max(), until - fit.num_pairs());
      if (now.offsets.empty()) break;
      idle = now.size < best.size ? 0 : idle + 1;
      if (now.size < best.size) best = now;
    }
    effort -= fit.num_pairs() - before;
    if (best.size <= lower_bound || effort_of_orders < cost) break;
  }
  return best;
}

Packing improve(const std::vector<PackItem>& items, FirstFit& fit, Packing best, std::int64_t lower_bound,
                std::int64_t effort) {
  std::vector<std::uint32_t> order(items.size()), trial;
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return best.offsets[a] < best.offsets[b]; });
  Packing now              = fit.place(order);
  std::uint64_t draw       = 88172645463325252u;  // xorshift with a fixed seed: the same numbers on every machine
  const std::int64_t until = fit.num_pairs() + effort;
  for (int idle = 0; fit.num_pairs() < until && idle < 4 * patience && best.size > lower_bound; ++idle) {
    trial = order;
    for (std::size_t i = 1; i < trial.size(); ++i) {
      if (now.offsets[trial[i]] + items[trial[i]].size != now.size) continue;
      draw ^= draw << 13, draw ^= draw >> 7, draw ^= draw << 17;
      const auto at = trial.begin() + static_cast<std::ptrdiff_t>(i);
      std::rotate(trial.begin() + static_cast<std::ptrdiff_t>(draw % i), at, at + 1);
    }
    Packing next = fit.place(trial, now.size, until - fit.num_pairs());
    if (next.offsets.empty()) break;
    if (next.size > now.size) continue;
    order.swap(trial);
    now = std::move(next);
    if (now.size >= best.size) continue;
    best = now;
    idle = 0;
  }
  return best;
}

}  // namespace stepgraph
