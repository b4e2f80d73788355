#include "graphs/step/searched_schedule.hpp"

#include <algorithm>
#include <chrono>

#include "engine/base/error.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"
#include "graphs/step/pipeline.hpp"

namespace stepgraph {
namespace {

// The limit in units only estimates one in bytes: two schedules that hold as many microbatches can differ in what else
// is alive, and a microbatch that waits for W takes more than one that waits for I. So units shrink until the memory
// plan keeps the bytes, and grow while it does.
class ByteSearch {
 public:
  ByteSearch(const Model& model, Plan& plan, const BatchSpec& batch, ScheduleSearch search)
      : model_(model), plan_(plan), batch_(batch), search_(std::move(search)), step_(1.0 / num_chunks(plan.pipeline)) {
    search_.budget_s /= most_rounds / 2;  // all rounds together take at most twice as long as one search
    tell_ = std::move(search_.on_progress);
    if (!tell_) return;
    // What bytes allow is not known in units. So only the bound without a limit is proved.
    ScheduleSearch free = search_;
    free.limit          = 0;
    free.budget_s       = 1e-9;  // starts alone
    free.on_progress    = {};
    bound_              = search_schedule(free).lower_bound_rate;
    search_.on_progress = [this](SearchProgress progress) {
      if (!progress.is_result) tell(std::move(progress));  // a round's result may not be the one that runs
    };
  }
  ByteSearch(const ByteSearch&)            = delete;
  ByteSearch& operator=(const ByteSearch&) = delete;

  void run() {
    for (int round = 1; round <= most_rounds && try_units(); ++round) {
      if (round + 1 == most_rounds && !best_) search_.limit = 1;  // the least that a schedule can hold
    }
    try_kinds();
    if (!best_) {
      throw Error(ErrorKind::config,
                  str("pipeline.limit: ", plan_.pipeline.limit_bytes, " bytes, but the activations of ", least_kind_,
                      ", the order that takes least, need ", least_.bytes, " on pipeline rank ", least_.pp,
                      " (as many or more)"));
    }
    plan_.pipeline.found = best_;
    if (!tell_) return;
    const double rate = simulate(*best_, {.costs = search_.costs}).bubble_rate;
    tell({.bubble_rate = rate, .doing = "found by " + how_, .is_result = true});
  }

 private:
  static constexpr int most_rounds = 8;

  bool fits(PipelineSchedule schedule) {
    plan_.pipeline.found = std::make_shared<const PipelineSchedule>(std::move(schedule));
    planned_             = planned_activations(model_, plan_, batch_);
    return planned_.bytes <= plan_.pipeline.limit_bytes;
  }

  // Searches with the present limit, and sets the next one. False: another one cannot be better.
  bool try_units() {
    FoundSchedule found = search_schedule(search_);
    const double peak   = *std::max_element(found.peak_activation.begin(), found.peak_activation.end());
    const bool kept     = fits(std::move(found.schedule));
    const double scaled = peak * static_cast<double>(plan_.pipeline.limit_bytes) /
                          static_cast<double>(std::max<std::int64_t>(1, planned_.bytes));
    if (!kept) {
      too_many_     = std::min(too_many_, peak);
      search_.limit = std::max(1.0, std::min(scaled, peak - step_));
      return peak > 1 && search_.limit > most_kept_;
    }
    if (found.longest_span < span_) take(found.longest_span, found.how);
    most_kept_       = search_.limit;
    const bool binds = peak + step_ > search_.limit && found.bubble_rate > 1e-9;
    search_.limit    = std::min(std::max(scaled, most_kept_ + step_), too_many_ - step_);
    return binds && search_.limit > most_kept_;
  }

  // A fixed kind can be within the bytes where a schedule with as many units is not. Those that hold one microbatch at
  // a time, with B, take least, so none is refused before they are tried.
  void try_kinds() {
    const int chunks = num_chunks(plan_.pipeline);
    for (const ScheduleKind kind : all_schedule_kinds) {
      PipelineSchedule schedule;
      try {
        schedule = pipeline_schedule(kind, {search_.ranks, search_.microbatches, chunks});
      } catch (const Error&) {
        continue;  // not with these numbers
      }
      try_kind(std::move(schedule), str(kind));
    }
    if (chunks == 2 && search_.ranks > 1) try_kind(one_by_one_in_v(), "one microbatch after another in V placement");
  }

  void try_kind(PipelineSchedule schedule, const std::string& name) {
    const double span = simulate(schedule, {.costs = search_.costs}).longest_span;
    if (span >= span_ * (1 - 1e-12) || !validate(schedule).weights_in_order) return;
    if (fits(std::move(schedule))) return take(span, name);
    if (least_.bytes == 0 || planned_.bytes < least_.bytes) least_ = planned_, least_kind_ = name;
  }

  // round-robin is in looped placement.
  [[nodiscard]] PipelineSchedule one_by_one_in_v() const {
    PipelineSchedule schedule{.rank_of_stage = v_placement(search_.ranks), .num_microbatches = search_.microbatches};
    schedule.rows.resize(static_cast<std::size_t>(search_.ranks));
    for (int i = 0; i < search_.microbatches; ++i) {
      const auto add = [&](int stage, ActionKind kind) {
        const Rank rank = schedule.rank_of_stage[static_cast<std::size_t>(stage)];
        schedule.rows[static_cast<std::size_t>(index(rank))].push_back({Stage{stage}, kind, Microbatch{i}});
      };
      for (int stage = 0; stage < schedule.num_stages(); ++stage) add(stage, ActionKind::forward);
      for (int stage = schedule.num_stages() - 1; stage >= 0; --stage) add(stage, ActionKind::backward);
    }
    return schedule;
  }

  // The schedule of the last fits() is the best.
  void take(double span, const std::string& how) {
    best_ = plan_.pipeline.found;
    span_ = span;
    how_  = how;
  }

  void tell(SearchProgress progress) const {
    progress.elapsed_s        = std::chrono::duration<double>(Clock::now() - begin_).count();
    progress.lower_bound_rate = std::min(bound_, progress.bubble_rate);  // rounding
    tell_(progress);
  }

  using Clock = std::chrono::steady_clock;

  const Model& model_;
  Plan& plan_;
  const BatchSpec& batch_;
  ScheduleSearch search_;
  const double step_;             // what one more activation of a stage counts
  double most_kept_ = 0;          // the highest limit in units whose schedule keeps the bytes
  double too_many_  = unlimited;  // the lowest peak of a schedule that does not
  double span_      = unlimited;  // of the best schedule
  std::shared_ptr<const PipelineSchedule> best_;
  std::string how_;                     // the best one was found
  PlannedActivations planned_, least_;  // of the last schedule, and of the fixed one that takes least
  std::string least_kind_;
  std::function<void(const SearchProgress&)> tell_;  // of the rounds together
  double bound_                  = 0;                // of the bubble rate
  const Clock::time_point begin_ = Clock::now();
};

}  // namespace

void set_searched_schedule(const Model& model, Plan& plan, const BatchSpec& batch, ScheduleSearch search) {
  if (plan.pipeline.limit_bytes > 0) return ByteSearch(model, plan, batch, std::move(search)).run();
  plan.pipeline.found = std::make_shared<const PipelineSchedule>(search_schedule(search).schedule);
}

}  // namespace stepgraph
