#include "graphs/schedule/search/placement.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "engine/base/error.hpp"
#include "graphs/schedule/search/build.hpp"
#include "graphs/schedule/search/improve.hpp"
#include "graphs/schedule/search/join.hpp"
#include "graphs/schedule/simulation.hpp"

namespace stepgraph::search {
namespace {

std::string name_of(const Setting& setting) {
  if (setting.chunks == 1) return "one chunk";
  return setting.ranks > 1 && setting.rank_of(setting.ranks) > 0 ? "two chunks in V placement"
                                                                 : "two chunks in looped placement";
}

// All kinds. Those that are often good and fast to make come first, for searches with little time.
constexpr std::array kinds_to_try{ScheduleKind::one_f_one_b, ScheduleKind::zb_h1,      ScheduleKind::zb_h2,
                                  ScheduleKind::interleaved, ScheduleKind::zb_v,       ScheduleKind::v_half,
                                  ScheduleKind::v_min,       ScheduleKind::dualpipe_v, ScheduleKind::gpipe,
                                  ScheduleKind::sequential,  ScheduleKind::round_robin};
static_assert(kinds_to_try.size() == all_schedule_kinds.size());

// One microbatch after another. Fits every limit that is at least 1.
Rows one_by_one(const Setting& setting) {
  Rows rows{.length = setting.row_length()};
  for (int i = 0; i < setting.ranks * setting.microbatches; ++i) {
    for (int slot = 0; slot < setting.chunks; ++slot) rows.letters.push_back(static_cast<Letter>(3 * slot + F));
    for (int slot = setting.chunks - 1; slot >= 0; --slot) {
      rows.letters.push_back(static_cast<Letter>(3 * slot + I));
      rows.letters.push_back(static_cast<Letter>(3 * slot + W));
    }
  }
  return rows;
}

// A kind for this setting; none if it has another placement or does not take these numbers.
std::optional<PipelineSchedule> schedule_of_kind(const Setting& setting, ScheduleKind kind) {
  const ScheduleSpec spec{setting.ranks, setting.microbatches, setting.chunks};
  try {
    check_schedule_spec(kind, spec);
  } catch (const Error&) {
    return {};
  }
  PipelineSchedule schedule = pipeline_schedule(kind, spec);
  if (schedule.rank_of_stage != setting.rank_of_stage) return {};
  return schedule;
}

bool has_weights_in_order(const PipelineSchedule& schedule) {
  std::vector<int> next(schedule.rank_of_stage.size(), 0);  // [stage]
  for (const std::vector<Action>& row : schedule.rows) {
    for (const Action& action : row) {
      if (action.kind != ActionKind::weight_gradient && action.kind != ActionKind::backward) continue;
      if (next[size(index(action.stage))]++ != index(action.microbatch)) return false;
    }
  }
  return true;
}

}  // namespace

bool same_span(double a, double b) noexcept { return std::abs(a - b) < 1e-12 * std::max(a, b); }

PlacementSearch::PlacementSearch(const Setting& setting, std::uint64_t seed, const std::function<bool()>& stop)
    : setting_(&setting),
      bound_(span_bound(setting, stop)),
      timer_(setting),
      random_(seed),
      enough_(bound_.span * (1 + 1e-9)),
      doing_(name_of(setting)) {}

void PlacementSearch::take(const std::string& how) {
  if (!(timer_.longest_span() < span_ * (1 - 1e-12))) return;
  span_ = timer_.longest_span();
  best_ = timer_.rows();
  how_  = how;
}

void PlacementSearch::try_rows(const Rows& rows, const std::string& how) {
  if (rows.length > 0 && timer_.set(rows)) take(how);
}

void PlacementSearch::try_kinds(const std::function<bool()>& is_over) {
  int tried = 0;
  for (const ScheduleKind kind : kinds_to_try) {
    // Even a search without time tries two that fit: 1f1b and zb-h1, or zb-v and v-half.
    if (tried >= 2 && span_ < first_ && is_over()) return;
    auto schedule = schedule_of_kind(*setting_, kind);
    if (!schedule) continue;
    const Rows rows = rows_of(*setting_, *schedule);
    if (!fits(*setting_, rows) || !timer_.set(rows)) continue;
    ++tried;
    const double span = timer_.longest_span();
    take(str(kind));
    // With B it is no faster than with I and W apart.
    const bool may_be_best = span < fixed_.span || same_span(span, fixed_.span);
    if (may_be_best && !is_over()) try_unchanged(kind, std::move(*schedule));
  }
}

// Of kinds with the same span, the one with the lower peak is better.
void PlacementSearch::try_unchanged(ScheduleKind kind, PipelineSchedule schedule) {
  if (!has_weights_in_order(schedule)) return;
  const auto peaks  = peak_activations(schedule, setting_->retain);
  const double peak = *std::max_element(peaks.begin(), peaks.end());
  if (peak > setting_->limit) return;
  const double span = simulate(schedule, {.costs = setting_->costs, .retain = setting_->retain}).longest_span;
  if (same_span(span, fixed_.span) ? peak < fixed_.peak : span < fixed_.span)
    fixed_ = {kind, std::move(schedule), span, peak};
}

std::vector<Counts> PlacementSearch::counts_to_try() const {
  const int p = setting_->ranks, m = setting_->microbatches * setting_->chunks;
  const double room = std::min<double>(setting_->limit * setting_->chunks, m);
  std::vector<Counts> all;
  const auto add = [&](const auto& in_flight, const auto& late) {
    Counts counts;
    for (int rank = 0; rank < p; ++rank) {
      counts.in_flight.push_back(std::clamp(static_cast<int>(in_flight(rank)), 1, static_cast<int>(room)));
      counts.late.push_back(std::clamp(static_cast<int>(late(rank)), 0, m));
    }
    all.push_back(std::move(counts));
  };
  if (setting_->chunks == 1) {
    for (const double more : {0.0, 0.003, 0.01, 0.03, 0.1, 0.3}) {
      SpanBound needs;
      if (!needs_of_span(*setting_, bound_.span * (1 + 1e-9 + more), needs)) continue;
      for (const int step : {0, 1, 2}) {  // a rank needs at least as many in flight as the rank after it
        for (int rank = p - 2; rank >= 0; --rank) {
          int& number = needs.first_forwards[size(rank)];
          number      = std::max(number, needs.first_forwards[size(rank + 1)] + step);
        }
        add([&](int rank) { return needs.first_forwards[size(rank)]; },
            [&](int rank) { return needs.last_weights[size(rank)] - 1; });
      }
    }
    for (const double slope : {0.5, 1.0, 1.5, 2.0}) {
      add([&](int rank) { return slope * (p - rank); }, [&](int rank) { return slope * rank; });
    }
    add([&](int) { return room; }, [&](int rank) { return rank; });
    return all;
  }
  const bool v_shape = p > 1 && setting_->rank_of(p) > 0;
  for (const double share : {0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5}) {
    for (const double late : {0.0, 0.5, 1.0, 2.0}) {
      if (v_shape) add([&](int) { return share * 2 * p; }, [&](int rank) { return late * rank; });
      add([&](int rank) { return share * (2 * (p - 1 - rank) + p + 1); }, [&](int rank) { return late * rank; });
    }
  }
  return all;
}

std::vector<MakeRows> PlacementSearch::makers() const {
  const Setting& setting = *setting_;
  std::vector<MakeRows> all;
  if (setting.chunks == 1) {
    all.push_back({.make = [&setting](const Counts& counts, const MakeRows::Stop&) {
      return build_regular_rows(setting, counts.in_flight, counts.late);
    }});
  }
  double forward = 0;
  for (int stage = 0; stage < setting.num_stages(); ++stage) forward += setting.cost(stage).F / setting.num_stages();
  for (const bool eager : {false, true}) {
    for (const double patience : {0.0, 0.5}) {
      for (const bool deep : {true, false}) {
        if (setting.chunks == 1 && !deep) continue;
        const BuildRules rules{
            .fill = 0.5, .tail_fill = 0.2, .patience = patience * forward, .eager = eager, .deep = deep};
        all.push_back({.make =
                           [&setting, rules](const Counts& counts, const MakeRows::Stop& stop) {
                             BuildRules with_counts = rules;
                             with_counts.in_flight  = counts.in_flight;
                             with_counts.late       = counts.late;
                             return build_rows(setting, with_counts, stop);
                           },
                       .effort = 8});
      }
    }
  }
  return all;
}

// All counts with all rules; the best of each rules, the best first.
void PlacementSearch::try_rules(const std::function<bool()>& is_over) {
  const bool has_kind              = span_ < first_;
  const std::vector<Counts> counts = counts_to_try();
  const std::vector<MakeRows> all  = makers();
  for (const MakeRows& make : all) {
    Start& best = starts_.emplace_back(Start{.make = make});
    for (const Counts& one : counts) {
      if (span_ <= enough_ || is_over()) break;
      const Rows rows = make.make(one, is_over);
      if (rows.length == 0 || !timer_.set(rows) || timer_.longest_span() >= best.span) continue;
      best.span   = timer_.longest_span();
      best.counts = one;
      take("rules");
    }
  }
  // Where no kind fits, even a search without time has some rules: with one chunk those of 1f1b, within the limit.
  if (!has_kind && is_over()) {
    Counts least = counts.back();
    for (int rank = 0; setting_->chunks == 1 && rank < setting_->ranks; ++rank) {
      least.in_flight[size(rank)] = static_cast<int>(std::min<double>(setting_->limit, setting_->ranks - rank));
      least.late[size(rank)]      = 0;
    }
    try_rows(all[setting_->chunks == 1 ? 1 : 0].make(least, [] { return false; }), "rules");
  }
  std::erase_if(starts_, [](const Start& start) { return start.span == never; });
  std::stable_sort(starts_.begin(), starts_.end(), [](const Start& a, const Start& b) { return a.span < b.span; });
}

void PlacementSearch::start(const std::function<bool()>& is_over) {
  doing_ = name_of(*setting_) + ": starts";
  try_rows(one_by_one(*setting_), "one microbatch after another");
  first_ = span_ * (1 - 1e-12);
  try_kinds(is_over);
  try_rules(is_over);
}

void PlacementSearch::improve(double budget_s, const std::function<bool()>& is_over) {
  // Timing takes about 10 ns for an action, and building rows as much. A small schedule needs no more than so many
  // trials.
  const double actions = static_cast<double>(setting_->ranks) * setting_->row_length();
  const double all     = std::min(25e6 * budget_s, 300e3 * actions);
  const auto options   = [&](double share, double heat) {
    return ImproveOptions{
          .most_timed = static_cast<std::int64_t>(share * all), .heat = heat, .enough = enough_, .stop = is_over};
  };
  doing_ = name_of(*setting_) + ": counts";
  for (const auto& [start, heat, share] : {std::tuple{0, 0.03, 0.3}, {0, 0.3, 0.1}, {1, 0.1, 0.05}, {2, 0.1, 0.05}}) {
    if (size(start) >= starts_.size()) break;
    if (span_ <= enough_ || is_over()) return;
    const Start& from = starts_[size(start)];
    timer_.set(best_);  // what it has if the clock ends it at once
    search_counts(*setting_, timer_, from.make, from.counts, random_, options(share, heat));
    take("counts");
  }
  doing_ = name_of(*setting_) + ": moves";
  for (const double heat : {0.03, 0.1, 0.3, 0.1, 0.03}) {
    if (span_ <= enough_ || is_over()) return;
    timer_.set(best_);
    improve_rows(*setting_, timer_, random_, options(0.1, heat));
    take(how_.ends_with("moves") ? how_ : how_ + ", moves");
  }
}

PipelineSchedule PlacementSearch::schedule(const std::function<bool()>& is_over) const {
  return schedule_of_rows(*setting_, best_, joinable(*setting_, best_, is_over));
}

}  // namespace stepgraph::search
