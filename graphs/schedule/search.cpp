#include "graphs/schedule/search.hpp"

#include <algorithm>
#include <chrono>

#include "engine/base/error.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/search/placement.hpp"
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
    const double elapsed = elapsed_s();
    if (search_.on_progress && elapsed - told_s_ >= 0.1) {
      told_s_ = elapsed;
      search_.on_progress({.elapsed_s        = elapsed,
                           .bubble_rate      = rate_of(now.setting(), std::min(best_span, now.span())),
                           .lower_bound_rate = bound_rate,
                           .doing            = now.doing()});
    }
    return is_late();
  }
  bool is_late() {  // without progress
    out_of_time_ |= search_.by_clock && elapsed_s() > search_.budget_s;
    return out_of_time_;
  }
  void finish(const FoundSchedule& found) const {
    if (!search_.on_progress) return;
    search_.on_progress({.elapsed_s        = elapsed_s(),
                         .bubble_rate      = found.bubble_rate,
                         .lower_bound_rate = found.lower_bound_rate,
                         .doing            = "found by " + found.how,
                         .is_result        = true});
  }
  [[nodiscard]] bool out_of_time() const { return out_of_time_; }

 private:
  [[nodiscard]] double elapsed_s() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

  const ScheduleSearch& search_;
  Clock::time_point begin_ = Clock::now();
  double told_s_           = -1;  // the first call of is_over reports
  bool out_of_time_        = false;
};

double most_of(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

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
    searches.emplace_back(setting, search.seed, [&] { return watch.is_late(); });
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
  for (const PlacementSearch& one : searches) {
    const search::FixedKind& fixed = one.fixed();
    const bool same                = search::same_span(fixed.span, timeline.longest_span);
    if (same && (&one != best || fixed.peak > most_of(timeline.peak_activation))) continue;
    if (!same && fixed.span > timeline.longest_span) continue;
    found.schedule = fixed.schedule;
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
  watch.finish(found);
  return found;
}

}  // namespace stepgraph
