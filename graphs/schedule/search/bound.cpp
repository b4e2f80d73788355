#include "graphs/schedule/search/bound.hpp"

#include <algorithm>
#include <cmath>

// Why no schedule can have a shorter longest span.
//
// Let every rank r have a span of at most L, from its begin b(r). B counts as I and then W. This never makes a schedule
// longer, nor makes it hold more (rows.hpp). All times of a rank are counted from its own begin, so nothing
// depends on how long a rank waits for its first input. The stages of rank r are s0 < ... < s1. Its first action is an
// F of s0, since a microbatch comes to s0 first. Stage r is the first of rank r in every placement that is searched, so
// b(r + 1) >= b(r) + F(r) + transfer: rank r + 1 begins with the output of an F of stage r.
//
// 1. Work. L is at least the sum of the rank's actions. Its idle time is the rest: L - work.
//
// 2. First I. The first I of a rank is of s1, for a gradient comes to s1 first. It starts after an F of s0 has gone
//    through all later stages, and the gradient back to s1: the path. Where stage s1 + 1 is on rank r + 1, its own
//    first I gives more: it starts at b(r + 1) + first(r + 1) or later, so
//      first(r) >= F(r) + transfer + first(r + 1) + I(s1 + 1) + transfer.
//    Before its first I a rank does F only. It has done n of them, and holds all n, so n is at most limit x chunks. It
//    is idle for first(r) - (the time of n F), which is at most L - work. So n >= (first(r) - (L - work)) / F; and
//    first(r) is at least the time of n F. Smaller values of first() only make all other conditions weaker, so the
//    least ones are taken, from the last rank to the first. The rank is idle for at least max(0, first(r) - the time of
//    as many F as it can hold).
//
// 3. After the last F. The last F of a rank is of s1, its last I of s0. After the last F, its microbatch goes from s1
//    to the last stage and back to s0: the trip. Until the last I starts, the rank can do only I and W. At the last F
//    it holds k activations whole and q for W, with k + retain x q <= limit x chunks. So it can do k - 1 times I and
//    q + k - w times W, where w of W come after the last I. The rest of the trip is idle time. If some F
//    comes after the first I, this idle time is after that of 2, and both count. That is so for every rank with more F
//    than it can hold.
//
// 4. Last I. Let last(r) be the end of the last I of rank r. Rank r - 1 does I of this microbatch afterwards, so, with
//    times from each rank's begin, last(r) <= last(r - 1) - F(r - 1) - transfer - I(r - 1) - transfer. And last(r) <=
//    L - (the time of w W). Until then rank r has done all F, all I and all W but w of them, and was idle as in 2
//    and 3. At its last I it holds 1 whole, and w - 1 for W, so w is bounded, too. A smaller w leaves more time to the
//    ranks after, so the least w is taken that gives the rank enough time.
//
// 5. Memory. A stage holds a microbatch from the begin of F to the end of I, at least for the way to the last stage and
//    back, and the share `retain` of it for at least the time of W. These areas together are at most limit x L.
//    (With retain 1 all activations are whole, so only the integer part of limit x chunks counts.)
//    With one chunk, a rank holds K = floor(limit) whole. When its F number k + K starts, counted from 0, at least
//    k + 1 of its I have ended. One of these I belongs to an F that is not among the first k, so at least the time of
//    the way has passed since F number k started. So F number j x K + i starts no earlier than j x way + i x F.
//
// Each condition asks for less if L grows. So the least L that passes all of them is found by halving an interval. An
// interval's lower end that does not pass is proved; rounding is on the safe side by a relative 1e-9 at counts.
namespace stepgraph::search {
namespace {

// Counts for values with rounding errors: never too large and never too small.
int least_count(double value) {
  const double count = std::clamp(value, -1e9, 1e9);  // an int holds it
  return static_cast<int>(std::ceil(count - 1e-9 * (1 + std::abs(count))));
}
int most_count(double value, int most) {
  const double count = std::max(value, -1e9);
  return count >= most ? most : static_cast<int>(std::floor(count + 1e-9 * (1 + std::abs(count))));
}

// What the conditions need to know of a rank; independent of L.
struct RankFacts {
  double work = 0, sum_forward = 0, sum_input = 0;  // of all microbatches
  double least_forward = never, most_forward = 0;   // of one stage
  double most_input = 0, most_weight = 0;           // of one stage
  double least_weight = never, sum_weight = 0;      // of one stage; of one microbatch
  double path = 0;                                  // from the begin to the first I at the earliest
  double trip = 0;                                  // from the end of the last F to the last I
  // After the last F, before the last I: the most time of I alone, and of I and all W that are left.
  double most_inputs_after = 0, most_actions_after = 0;
  int last_stage = 0;
};

class Conditions {
 public:
  explicit Conditions(const Setting& setting) : setting_(setting) {
    const int stages = setting.num_stages();
    // Times of the way from a stage's F to the last stage, and from there back to a stage's I; both ends excluded.
    std::vector<double> down(size(stages)), up(size(stages));
    for (int s = stages - 2; s >= 0; --s) {
      down[size(s)] = setting.transfer(s, s + 1) + (s + 1 < stages - 1 ? setting.cost(s + 1).F : 0) + down[size(s + 1)];
      up[size(s)]   = setting.cost(s + 1).I + setting.transfer(s + 1, s) + up[size(s + 1)];
    }
    const auto way = [&](int from, int to) {  // from the end of F of `from` to the begin of I of `to`
      return down[size(from)] + (from < stages - 1 ? setting.cost(stages - 1).F : 0) + up[size(to)];
    };
    const int m = setting.microbatches;
    holds_      = setting.limit * setting.chunks;
    if (setting.retain == 1 && holds_ < never) holds_ = std::floor(holds_ * (1 + 1e-9));  // all are whole
    all_           = m * setting.chunks;
    most_forwards_ = most_count(holds_, all_);
    most_weights_  = setting.retain > 0 ? most_count(1 + (holds_ - 1) / setting.retain, all_) : all_;
    for (int rank = 0; rank < setting.ranks; ++rank) {
      const std::vector<int> of_rank = setting.stages_of(rank);
      RankFacts facts{.work = setting.work(rank), .last_stage = of_rank.back()};
      double area = 0;
      for (const int s : of_rank) {
        const Costs& cost = setting.cost(s);
        facts.sum_forward += m * cost.F;
        facts.sum_input += m * cost.I;
        facts.sum_weight += cost.W;
        facts.least_forward = std::min(facts.least_forward, cost.F);
        facts.most_forward  = std::max(facts.most_forward, cost.F);
        facts.most_input    = std::max(facts.most_input, cost.I);
        facts.most_weight   = std::max(facts.most_weight, cost.W);
        facts.least_weight  = std::min(facts.least_weight, cost.W);
        area += m * (cost.F + way(s, s) + cost.I + setting.retain * cost.W);
      }
      facts.path = setting.cost(of_rank.front()).F + way(of_rank.front(), of_rank.back());
      facts.trip = way(of_rank.back(), of_rank.front());
      for (int whole = 1; whole <= most_forwards_; ++whole) {
        const int waiting =
            setting.retain > 0 ? most_count((holds_ - whole) / setting.retain, all_ - whole) : all_ - whole;
        facts.most_actions_after =
            std::max(facts.most_actions_after, (whole - 1) * facts.most_input + (waiting + whole) * facts.most_weight);
      }
      facts.most_inputs_after = (most_forwards_ - 1) * facts.most_input;
      least_                  = std::max({least_, facts.work, area / holds_});
      if (setting.chunks == 1 && most_forwards_ < m) {
        const Costs& cost  = setting.cost(of_rank.front());
        const double whole = cost.F + way(rank, rank) + cost.I;
        const int rounds = (m - 1) / most_forwards_, rest = (m - 1) % most_forwards_;
        least_ = std::max(least_, rounds * whole + rest * cost.F + whole + cost.W);
      }
      facts_.push_back(facts);
    }
  }

  [[nodiscard]] double least() const { return least_; }  // conditions 1 and 5

  bool hold(double span, SpanBound& needs) {
    needs = {.span           = span,
             .first_forwards = std::vector<int>(size(setting_.ranks)),
             .last_weights   = std::vector<int>(size(setting_.ranks))};
    if (span < least_ * (1 - 1e-12)) return false;
    head_idle_.assign(size(setting_.ranks), 0);
    return first_inputs(span, needs) && last_inputs(span, needs);
  }

 private:
  // Condition 2, from the last rank.
  bool first_inputs(double span, SpanBound& needs) {
    double first_after = 0;
    for (int rank = setting_.ranks - 1; rank >= 0; --rank) {
      const RankFacts& facts = facts_[size(rank)];
      const int next         = facts.last_stage + 1;
      double first           = facts.path;
      if (next < setting_.num_stages() && setting_.rank_of(next) == rank + 1) {
        first = std::max(first, setting_.cost(rank).F + setting_.transfer(rank, rank + 1) + first_after +
                                    setting_.cost(next).I + setting_.transfer(next, next - 1));
      }
      int forwards = 1;
      if (facts.most_forward > 0) {
        const double count = (first - (span - facts.work)) / facts.most_forward;
        if (count > most_forwards_ + 1) return false;
        forwards = std::max(1, least_count(count));
      }
      if (forwards > most_forwards_) return false;
      first_after                      = std::max(first, forwards * facts.least_forward);
      needs.first_forwards[size(rank)] = forwards;
      head_idle_[size(rank)] = std::max(0.0, first - std::min(most_forwards_ * facts.most_forward, facts.sum_forward));
    }
    return true;
  }

  // Conditions 3 and 4, from the first rank.
  bool last_inputs(double span, SpanBound& needs) {
    const double slack = 1e-12 * span;
    double last        = never;
    for (int rank = 0; rank < setting_.ranks; ++rank) {
      const RankFacts& facts = facts_[size(rank)];
      if (rank > 0) {
        const Costs& before = setting_.cost(rank - 1);
        last -= before.F + setting_.transfer(rank - 1, rank) + before.I + setting_.transfer(rank, rank - 1);
      }
      const double all_weights = facts.sum_weight * setting_.microbatches;
      int weights              = 1;
      for (;; ++weights) {
        if (weights > most_weights_) return false;
        const double tail = std::max(0.0, facts.trip - most_after_forwards(facts, weights));
        const double head = head_idle_[size(rank)];
        const double idle = all_ > most_forwards_ ? head + tail : std::max(head, tail);
        const double done = all_weights - weights * facts.most_weight;
        if (idle + facts.sum_forward + facts.sum_input + done <=
            std::min(last, span - weights * facts.least_weight) + slack)
          break;
      }
      last                           = std::min(last, span - weights * facts.least_weight);
      needs.last_weights[size(rank)] = weights;
    }
    return true;
  }

  // The most time that a rank can compute between its last F and its last I, with `after` W after that.
  [[nodiscard]] static double most_after_forwards(const RankFacts& facts, int after) {
    return std::max(facts.most_inputs_after, facts.most_actions_after - after * facts.most_weight);
  }

  const Setting& setting_;
  double holds_ = 0, least_ = 0;
  int all_ = 0, most_forwards_ = 0, most_weights_ = 0;
  std::vector<RankFacts> facts_;
  std::vector<double> head_idle_;
};

}  // namespace

bool needs_of_span(const Setting& setting, double span, SpanBound& needs) {
  return Conditions(setting).hold(span, needs);
}

SpanBound span_bound(const Setting& setting, const std::function<bool()>& stop) {
  Conditions conditions(setting);
  SpanBound needs;
  double low = conditions.least();
  if (conditions.hold(low, needs)) return needs;
  double high = 2 * low;
  while (!conditions.hold(high, needs)) high *= 2;
  for (int i = 0; i < 60 && high - low > 1e-12 * high && !stop(); ++i) {
    const double middle                           = (low + high) / 2;
    (conditions.hold(middle, needs) ? high : low) = middle;
  }
  conditions.hold(high, needs);
  needs.span = low;  // this one is proved
  return needs;
}

}  // namespace stepgraph::search
