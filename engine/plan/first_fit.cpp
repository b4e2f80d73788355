#include "engine/plan/first_fit.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace stepgraph {
namespace {

constexpr int patience            = 30;  // consecutive tries without improvement before a search stops
constexpr std::int64_t not_placed = -1;
constexpr std::uint32_t no_block  = std::numeric_limits<std::uint32_t>::max();

std::uint32_t span_length(const std::vector<PackItem>& items, std::uint32_t num_spans) {
  std::uint32_t last = 0;
  for (const PackItem& item : items) last = std::max(last, item.last);
  return last / num_spans + 1;
}

}  // namespace

// Finds the lowest gap of `size` bytes among ranges that are visited in the order of their first byte.
class FirstFit::Gap {
 public:
  explicit Gap(std::int64_t size) : size_(size) {}
  [[nodiscard]] std::int64_t offset() const { return offset_; }
  bool ends_at(std::int64_t begin, std::int64_t end) {  // true: offset() is the answer
    if (begin - offset_ >= size_) return true;
    offset_ = std::max(offset_, end);
    return false;
  }

 private:
  std::int64_t size_, offset_ = 0;
};

void FirstFit::Block::clear() {
  size  = 0;
  first = std::numeric_limits<std::uint32_t>::max();
  last  = 0;
  alive.fill(0);
}

void FirstFit::Block::append(const Placed& item) {
  for (std::size_t span = item.first_span; span <= item.last_span; ++span) alive[span] |= std::uint64_t{1} << size;
  items[size++] = item;
  first         = std::min(first, item.first);
  last          = std::max(last, item.last);
}

void FirstFit::Block::insert(const Placed& item) {
  const auto end    = items.begin() + static_cast<std::ptrdiff_t>(size);
  const auto behind = std::upper_bound(items.begin(), end, item.begin,
                                       [](std::int64_t begin, const Placed& other) { return begin < other.begin; });
  const auto place  = static_cast<std::size_t>(behind - items.begin());
  std::move_backward(behind, end, end + 1);
  *behind = item;
  ++size;
  first = std::min(first, item.first);
  last  = std::max(last, item.last);
  if (size > max_in_block) return;  // it is split now
  const std::uint64_t below = (std::uint64_t{1} << place) - 1;
  for (std::uint64_t& bits : alive) bits = (bits & below) | (bits & ~below) << 1;
  for (std::size_t span = item.first_span; span <= item.last_span; ++span) alive[span] |= std::uint64_t{1} << place;
}

std::uint64_t FirstFit::Block::near(const Placed& item) const {
  std::uint64_t bits = 0;
  for (std::size_t span = item.first_span; span <= item.last_span; ++span) bits |= alive[span];
  return bits;
}

FirstFit::FirstFit(const std::vector<PackItem>& items, const ItemPairs* apart)
    : items_(items), pairs_(apart), turns_per_span_(span_length(items, num_spans)) {
  if (apart == nullptr) return;
  apart_begin_.push_back(0);
  for (std::uint32_t item = 0; item < items.size(); ++item) {
    for_each_bit(apart->row(item), [&](std::uint32_t other) { apart_.push_back(other); });
    apart_begin_.push_back(static_cast<std::uint32_t>(apart_.size()));
  }
  offset_of_.resize(items.size());
}

FirstFit::Placed FirstFit::unplaced(std::uint32_t item) const {
  const PackItem& of = items_[item];
  return {0,
          of.size,
          of.first,
          of.last,
          item,
          static_cast<std::uint16_t>(of.first / turns_per_span_),
          static_cast<std::uint16_t>(of.last / turns_per_span_)};
}

bool FirstFit::ends_in(const Block& block, const Placed& item, Gap& gap, const auto& before) {
  for (std::uint64_t bits = block.near(item); bits != 0; bits &= bits - 1) {
    const Placed& other = block.items[static_cast<std::size_t>(std::countr_zero(bits))];
    if (other.first > item.last || other.last < item.first) continue;
    if (before(other.begin) || gap.ends_at(other.begin, other.end)) return true;
  }
  return false;
}

std::int64_t FirstFit::lowest_gap(const Placed& item) {
  Gap gap(item.end);
  for (const std::uint32_t number : by_offset_) {
    const Block& block = blocks_[number];
    if (!block.meets(item)) continue;
    num_pairs_ += static_cast<std::int64_t>(block.size);
    if (ends_in(block, item, gap, [](std::int64_t) { return false; })) break;
  }
  return gap.offset();
}

std::int64_t FirstFit::lowest_gap_apart(const Placed& item) {
  const std::size_t num_apart   = apart_begin_[item.item + 1] - apart_begin_[item.item];
  const std::size_t most_placed = max_in_block * by_offset_.size();
  return 16 * num_apart < most_placed ? lowest_gap_among_few(item) : lowest_gap_among_many(item);
}

// Compares with every placed item. This is faster than sorting the items of many pairs.
std::int64_t FirstFit::lowest_gap_among_many(const Placed& item) {
  const std::span<const std::uint64_t> apart = pairs_->row(item.item);
  Gap gap(item.end);
  for (const std::uint32_t number : by_offset_) {
    const Block& block = blocks_[number];
    num_pairs_ += static_cast<std::int64_t>(block.size);
    for (std::size_t i = 0; i < block.size; ++i) {
      const Placed& other  = block.items[i];
      const bool overlaps  = other.first <= item.last && item.first <= other.last;
      const bool are_apart = (apart[other.item / 64] >> other.item % 64 & 1) != 0;
      if ((overlaps || are_apart) && gap.ends_at(other.begin, other.end)) return gap.offset();
    }
  }
  return gap.offset();
}

// The items of pairs are sorted like the blocks, and each comes between the items that the lifetime overlaps.
std::int64_t FirstFit::lowest_gap_among_few(const Placed& item) {
  apart_now_.clear();
  for (std::uint32_t i = apart_begin_[item.item]; i < apart_begin_[item.item + 1]; ++i) {
    const std::uint32_t other = apart_[i];
    if (block_of_[other] != no_block)
      apart_now_.push_back({place_of_[block_of_[other]], offset_of_[other], offset_of_[other] + items_[other].size});
  }
  std::sort(apart_now_.begin(), apart_now_.end(),
            [](const Apart& a, const Apart& b) { return a.place != b.place ? a.place < b.place : a.begin < b.begin; });
  Gap gap(item.end);
  auto next = apart_now_.begin();
  for (std::size_t place = 0; place < by_offset_.size(); ++place) {
    const Block& block = blocks_[by_offset_[place]];
    num_pairs_ += static_cast<std::int64_t>(block.size);
    const auto ends_until = [&](std::int64_t begin) {
      for (; next != apart_now_.end() && next->place == place && next->begin <= begin; ++next) {
        if (gap.ends_at(next->begin, next->end)) return true;
      }
      return false;
    };
    if (block.meets(item) && ends_in(block, item, gap, ends_until)) break;
    if (ends_until(std::numeric_limits<std::int64_t>::max())) break;
  }
  return gap.offset();
}

void FirstFit::insert(const Placed& item) {
  if (by_offset_.empty()) new_block(0);
  auto at = std::partition_point(by_offset_.begin(), by_offset_.end(), [&](std::uint32_t number) {
    const Block& block = blocks_[number];
    return block.size > 0 && block.items[block.size - 1].begin <= item.begin;
  });
  if (at == by_offset_.end()) --at;
  blocks_[*at].insert(item);
  if (!apart_begin_.empty()) {
    block_of_[item.item]  = *at;
    offset_of_[item.item] = item.begin;
  }
  if (blocks_[*at].size > max_in_block) split(static_cast<std::size_t>(at - by_offset_.begin()));
}

void FirstFit::new_block(std::size_t place) {
  const auto number = static_cast<std::uint32_t>(by_offset_.size());
  if (number == blocks_.size()) blocks_.emplace_back();
  blocks_[number].clear();
  by_offset_.insert(by_offset_.begin() + static_cast<std::ptrdiff_t>(place), number);
  if (apart_begin_.empty()) return;
  place_of_.resize(by_offset_.size());
  for (; place < by_offset_.size(); ++place) place_of_[by_offset_[place]] = place;
}

void FirstFit::split(std::size_t place) {
  new_block(place + 1);
  Block &lower = blocks_[by_offset_[place]], &upper = blocks_[by_offset_[place + 1]];
  const std::size_t size = lower.size;
  lower.clear();
  for (std::size_t i = 0; i < size; ++i) (i < max_in_block / 2 ? lower : upper).append(lower.items[i]);
  if (apart_begin_.empty()) return;
  for (std::size_t i = 0; i < upper.size; ++i) block_of_[upper.items[i].item] = by_offset_[place + 1];
}

Packing FirstFit::place(const std::vector<std::uint32_t>& order, std::int64_t at_most, std::int64_t max_pairs) {
  Packing out{std::vector<std::int64_t>(items_.size(), not_placed), 0};
  const std::int64_t began = num_pairs_;
  const bool has_pairs     = !apart_begin_.empty();
  by_offset_.clear();
  if (has_pairs) block_of_.assign(items_.size(), no_block);
  for (const std::uint32_t item : order) {
    Placed placed           = unplaced(item);
    const std::int64_t size = placed.end;
    if (size > 0) placed.begin = has_pairs ? lowest_gap_apart(placed) : lowest_gap(placed);
    if (num_pairs_ - began > max_pairs) return {};
    placed.end        = placed.begin + size;
    out.offsets[item] = placed.begin;
    out.size          = std::max(out.size, placed.end);
    if (out.size > at_most) break;
    if (size > 0) insert(placed);
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
