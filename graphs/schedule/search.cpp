#include "graphs/schedule/search.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "engine/base/error.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/search_placement.hpp"
#include "graphs/schedule/simulation.hpp"

namespace stepgraph {
namespace {

using search::PlacementSearch;
using search::Setting;
using Clock = std::chrono::steady_clock;

constexpr int most_ranks = 1024;

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::config, str("auto: ", why)); }

Setting setting_of(const ScheduleSearch& search, std::vector<Rank> placement) {
  PipelineSchedule empty{.rank_of_stage = std::move(placement), .num_microbatches = search.microbatches};
  empty.rows.resize(static_cast<std::size_t>(search.ranks));
  Setting setting{.ranks        = search.ranks,
                  .chunks       = empty.num_stages() / search.ranks,
                  .microbatches = search.microbatches,
                  .costs        = stage_costs(empty, search.costs),
                  .retain       = search.retain};
  if (search.limit > 0) setting.limit = search.limit;
  setting.rank_of_stage = std::move(empty.rank_of_stage);
  return setting;
}

std::vector<Setting> settings_of(const ScheduleSearch& search) {
  const bool by_stage = search.ranks > 1 && search.costs.size() == 2 * static_cast<std::size_t>(search.ranks);
  std::vector<Setting> settings;
  if (search.chunks == SearchChunks::one || (search.chunks == SearchChunks::any && !by_stage))
    settings.push_back(setting_of(search, looped_placement(search.ranks, 1)));
  if (search.chunks == SearchChunks::one) return settings;
  settings.push_back(setting_of(search, looped_placement(search.ranks, 2)));
  if (search.ranks > 1) settings.push_back(setting_of(search, v_placement(search.ranks)));
  return settings;
}

double rate_of(const Setting& setting, double span) { return std::max(0.0, 1 - setting.most_work() / span); }

// Calls on_progress now and then, and watches the clock.
class Watch {
 public:
  explicit Watch(const ScheduleSearch& search) : search_(search) {}

  bool is_over(const PlacementSearch& now, double best_span, double bound_rate) {
    const auto time      = Clock::now();
    const double elapsed = std::chrono::duration<double>(time - begin_).count();
    if (search_.on_progress && elapsed - told_s_ >= 0.1) {
      told_s_ = elapsed;
      search_.on_progress({.elapsed_s        = elapsed,
                           .bubble_rate      = rate_of(now.setting(), std::min(best_span, now.span())),
                           .lower_bound_rate = bound_rate,
                           .doing            = now.doing()});
    }
    out_of_time_ |= search_.by_clock && elapsed > search_.budget_s;
    return out_of_time_;
  }
  [[nodiscard]] bool out_of_time() const { return out_of_time_; }

 private:
  const ScheduleSearch& search_;
  Clock::time_point begin_ = Clock::now();
  double told_s_           = -1;  // the first call of is_over reports
  bool out_of_time_        = false;
};

double most_of(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

// Of two schedules with spans that differ by rounding alone, the one with the lower peak is better.
bool same_span(double a, double b) { return std::abs(a - b) < 1e-12 * std::max(a, b); }

bool has_weights_in_order(const PipelineSchedule& schedule) {
  std::vector<int> next(schedule.rank_of_stage.size(), 0);  // [stage]
  for (const std::vector<Action>& row : schedule.rows) {
    for (const Action& action : row) {
      if (action.kind != ActionKind::weight_gradient && action.kind != ActionKind::backward) continue;
      if (next[static_cast<std::size_t>(index(action.stage))]++ != index(action.microbatch)) return false;
    }
  }
  return true;
}

// The best fixed kind of a placement, as it is: with B, and microbatches in its own order. Kinds whose W are not in
// microbatch order are left out: their rows with the microbatches in order are among the starts of the search.
struct FixedBest {
  PipelineSchedule schedule = {};
  double span = search::never, peak = search::never;
  ScheduleKind kind{};
};

FixedBest best_kind(const Setting& setting, const ScheduleCosts& costs, const std::function<bool()>& is_over) {
  FixedBest best;
  for (const ScheduleKind kind : all_schedule_kinds) {
    if (is_over()) break;
    auto schedule = search::fixed_kind(setting, kind);
    if (!schedule || !has_weights_in_order(*schedule)) continue;
    const double peak = most_of(peak_activations(*schedule, setting.retain));
    if (peak > setting.limit) continue;
    const double span = simulate(*schedule, costs).longest_span;
    if (same_span(span, best.span) ? peak < best.peak : span < best.span)
      best = {std::move(*schedule), span, peak, kind};
  }
  return best;
}

}  // namespace

void check_search(const ScheduleSearch& search) {
  if (search.ranks < 1 || search.ranks > most_ranks)
    refuse(str(search.ranks, " pipeline ranks (1 to ", most_ranks, ")"));
  if (search.microbatches < 1 || search.microbatches > search::most_microbatches)
    refuse(str(search.microbatches, " microbatches (1 to ", search::most_microbatches, ")"));
  const std::int64_t pairs =
      std::int64_t{search.ranks} * search.microbatches * (search.chunks == SearchChunks::one ? 1 : 2);
  if (pairs > max_stage_microbatches) refuse(str(pairs, " pairs of a stage and a microbatch (at most 2^21)"));
  if (!(search.retain >= 0 && search.retain <= 1)) refuse(str("retain ", search.retain, " (0 to 1)"));
  if (search.limit != 0 && !(search.limit >= 1))
    refuse(str("a limit of ", search.limit, " (at least 1, which a single microbatch holds; 0: no limit)"));
  if (!(search.budget_s > 0)) refuse(str("a budget of ", search.budget_s, " s (above 0)"));
}

FoundSchedule search_schedule(const ScheduleSearch& search) {
  check_search(search);
  const std::vector<Setting> settings = settings_of(search);
  Watch watch(search);
  std::vector<PlacementSearch> searches;
  FoundSchedule found{.lower_bound_rate = 1};
  searches.reserve(settings.size());
  for (const Setting& setting : settings) {
    searches.emplace_back(setting, search.seed);
    found.lower_bound_rate = std::min(found.lower_bound_rate, rate_of(setting, searches.back().bound_span()));
  }
  const PlacementSearch* best = nullptr;
  double best_span            = search::never;
  const auto is_over          = [&](const PlacementSearch& one) {
    return watch.is_over(one, best_span, found.lower_bound_rate);
  };
  const auto take = [&](const PlacementSearch& one) {
    if (one.span() < best_span * (1 - 1e-12)) best = &one, best_span = one.span();
  };
  for (PlacementSearch& one : searches) {
    one.start([&] { return is_over(one); });
    take(one);
  }
  for (PlacementSearch& one : searches) {
    if (one.bound_span() * (1 + 1e-9) >= best_span) continue;  // has nothing better
    one.improve(search.budget_s / static_cast<double>(searches.size()), [&] { return is_over(one); });
    take(one);
  }
  const ScheduleCosts costs{.costs = search.costs, .retain = search.retain};
  found.schedule            = best->schedule([&] { return is_over(*best); });
  found.how                 = best->how();
  ScheduleTimeline timeline = simulate(found.schedule, costs);
  for (const Setting& setting : settings) {
    FixedBest fixed = best_kind(setting, costs, [&] { return is_over(*best); });
    const bool same = same_span(fixed.span, timeline.longest_span);
    if (same && (&setting != &best->setting() || fixed.peak > most_of(timeline.peak_activation))) continue;
    if (!same && fixed.span > timeline.longest_span) continue;
    found.schedule = std::move(fixed.schedule);
    found.how      = str(fixed.kind);
    timeline       = simulate(found.schedule, costs);
  }
  found.bubble_rate     = timeline.bubble_rate;
  found.makespan        = timeline.makespan;
  found.longest_span    = timeline.longest_span;
  found.peak_activation = std::move(timeline.peak_activation);
  if (found.lower_bound_rate > found.bubble_rate + 1e-9) {
    throw Error(ErrorKind::run, str("auto: internal error: the rate ", found.bubble_rate, " of ", found.how,
                                    " is below the lower bound ", found.lower_bound_rate));
  }
  found.lower_bound_rate = std::min(found.lower_bound_rate, found.bubble_rate);  // rounding
  found.out_of_time      = watch.out_of_time();
  return found;
}

}  // namespace stepgraph
