#include "graphs/schedule/search/build.hpp"

#include <algorithm>

namespace stepgraph::search {
namespace {

class RowBuilder {
 public:
  RowBuilder(const Setting& setting, const BuildRules& rules) : setting_(setting), rules_(rules) {
    rows_.length = setting.row_length();
    rows_.letters.resize(size(setting.ranks) * size(rows_.length));
    ready_.assign(2 * size(setting.num_stages()) * size(setting.microbatches), never);
    for (int rank = 0; rank < setting.ranks; ++rank) {
      ranks_.push_back({.stages = setting.stages_of(rank)});
      stale_.push_back(rank);
    }
    decided_.resize(ranks_.size());
  }

  Rows build(const std::function<bool()>& stop) {
    constexpr int between = 1 << 14;  // actions from one question to the next: a few milliseconds
    for (int left = setting_.ranks * rows_.length; left > 0; --left) {
      if (left % between == 0 && stop()) return {};
      for (const int rank : stale_) {
        OneRank& one = ranks_[size(rank)];
        if (one.position < rows_.length) one.choice = choose(rank);
        decided_[size(rank)] = one.position < rows_.length ? one.choice.decided : never;
      }
      stale_.clear();
      const auto first = std::min_element(decided_.begin(), decided_.end());
      if (*first == never) return {};  // cannot happen
      const int rank = static_cast<int>(first - decided_.begin());
      take(rank, ranks_[size(rank)].choice);
    }
    return std::move(rows_);
  }

 private:
  // An action that a rank would take: decided at one time, begun then or later.
  struct Choice {
    int letter     = -1;
    double decided = never, begin = never;
  };
  struct OneRank {
    std::vector<int> stages;
    int position = 0;
    double free  = 0;
    std::array<int, 3 * most_chunks> count{};
    Choice choice{};
  };

  double& ready(int stage, int kind, int number) {
    return ready_[(2 * size(stage) + size(kind)) * size(setting_.microbatches) + size(number)];
  }

  // When the data of the next F or I of a slot is there. never: not known yet, or there is no next one.
  double arrival(const OneRank& one, int slot, int kind) {
    const int stage = one.stages[size(slot)], number = one.count[size(3 * slot + kind)];
    if (number == setting_.microbatches) return never;
    if (kind == F) return stage == 0 ? 0 : ready(stage - 1, F, number) + setting_.transfer(stage - 1, stage);
    if (number >= one.count[size(3 * slot + F)]) return never;
    return stage == setting_.num_stages() - 1 ? 0 : ready(stage + 1, I, number) + setting_.transfer(stage + 1, stage);
  }

  // A stage that is not the rank's last leaves room for one F of the last one. Otherwise ranks could fill up with F of
  // early stages, and no microbatch would ever reach the end.
  bool has_room(const OneRank& one, int slot, int whole, int retained) const {
    const int reserve =
        slot + 1 < setting_.chunks && one.count[size(3 * (setting_.chunks - 1) + F)] < setting_.microbatches;
    return setting_.activation(whole + 1 + reserve, retained) <= setting_.limit;
  }

  Choice choose(int rank) {
    const OneRank& one = ranks_[size(rank)];
    int whole = 0, retained = 0, weight_slot = -1;
    for (int slot = 0; slot < setting_.chunks; ++slot) {
      const int waiting = one.count[size(3 * slot + I)] - one.count[size(3 * slot + W)];
      whole += one.count[size(3 * slot + F)] - one.count[size(3 * slot + I)];
      retained += waiting;
      if (waiting > 0 &&
          (weight_slot < 0 || waiting > one.count[size(3 * weight_slot + I)] - one.count[size(3 * weight_slot + W)]))
        weight_slot = slot;
    }
    const auto weight = [&] { return Choice{3 * weight_slot + W, one.free, one.free}; };
    int forwards      = 0;
    for (int slot = 0; slot < setting_.chunks; ++slot) forwards += one.count[size(3 * slot + F)];
    const bool tail = forwards == setting_.chunks * setting_.microbatches;
    if (!tail && retained > rules_.late[size(rank)]) return weight();

    Choice forward, backward;  // the earliest of each
    bool blocked    = false;   // by the limit
    const bool more = whole < rules_.in_flight[size(rank)];
    for (int k = 0; k < setting_.chunks; ++k) {
      const int slot        = setting_.chunks - 1 - k;
      const double gradient = std::max(one.free, arrival(one, slot, I));
      if (gradient < backward.begin) backward = {3 * slot + I, gradient, gradient};
      const int forward_slot = rules_.deep ? slot : k;
      const double input     = std::max(one.free, arrival(one, forward_slot, F));
      // With two chunks the F of the last stage is always possible: I of the rank may wait for it.
      const bool last_stage = setting_.chunks > 1 && forward_slot == setting_.chunks - 1;
      if (input >= forward.begin || (!more && !rules_.eager && !last_stage)) continue;
      if (has_room(one, forward_slot, whole, retained)) {
        forward = {3 * forward_slot + F, input, input};
      } else {
        blocked |= input <= one.free;
      }
    }
    if (blocked && forward.begin > one.free && more && retained > 0) return weight();
    const Choice& liked = more ? forward : backward;
    const Choice& other = more ? backward : forward;
    Choice next =
        liked.begin < never && liked.begin <= std::max(one.free, other.begin) + rules_.patience ? liked : other;
    if (retained > 0) {
      const double time = setting_.cost(one.stages[size(weight_slot)]).W, gap = next.begin - one.free;
      if (gap > 0 && gap > (tail ? rules_.tail_fill : rules_.fill) * time) return weight();
    }
    next.decided = next.begin;
    return next;
  }

  void take(int rank, const Choice& choice) {
    OneRank& one   = ranks_[size(rank)];
    const int slot = choice.letter / 3, kind = choice.letter % 3;
    const int stage   = one.stages[size(slot)];
    const int number  = one.count[size(choice.letter)]++;
    const Costs& cost = setting_.cost(stage);
    one.free          = choice.begin + (kind == F ? cost.F : kind == I ? cost.I : cost.W);
    stale_.push_back(rank);
    rows_.row(rank)[one.position++] = static_cast<Letter>(choice.letter);
    if (kind == W) return;
    ready(stage, kind, number) = one.free;
    const int next             = kind == F ? stage + 1 : stage - 1;
    if (next >= 0 && next < setting_.num_stages()) stale_.push_back(setting_.rank_of(next));
  }

  const Setting& setting_;
  const BuildRules& rules_;
  Rows rows_;
  std::vector<double> ready_;  // [(2 * stage + kind) * microbatches + number]
  std::vector<OneRank> ranks_;
  std::vector<double> decided_;  // [rank]: the time of its choice
  std::vector<int> stale_;       // ranks that have to choose again
};

}  // namespace

Rows build_regular_rows(const Setting& setting, const std::vector<int>& in_flight, const std::vector<int>& late) {
  const int m = setting.microbatches;
  Rows rows{.length = setting.row_length()};
  for (std::size_t rank = 0; rank < in_flight.size(); ++rank) {
    std::array<int, 3> count{};
    const auto add = [&](int kind) {
      rows.letters.push_back(static_cast<Letter>(kind));
      ++count[size(kind)];
    };
    const auto has_room = [&] {
      return setting.activation(count[F] + 1 - count[I], count[I] - count[W]) <= setting.limit;
    };
    while (count[F] < std::min(m, in_flight[rank]) && has_room()) add(F);
    while (count[I] < m) {
      add(I);
      if (count[I] - count[W] > late[rank]) add(W);
      while (count[F] < m && !has_room() && count[W] < count[I]) add(W);
      if (count[F] < m && has_room()) add(F);
    }
    while (count[W] < m) add(W);
  }
  return rows;
}

Rows build_rows(const Setting& setting, const BuildRules& rules, const std::function<bool()>& stop) {
  return RowBuilder(setting, rules).build(stop);
}

}  // namespace stepgraph::search
