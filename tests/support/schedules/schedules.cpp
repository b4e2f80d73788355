#include "tests/support/schedules/schedules.hpp"

#include <algorithm>
#include <map>
#include <optional>

namespace stepgraph::testing {

ScheduleCase random_schedule_case(std::mt19937_64& random, int max_ranks, int max_microbatches) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const auto kind = all_schedule_kinds[static_cast<std::size_t>(draw(0, int{all_schedule_kinds.size()} - 1))];
  ScheduleSpec spec{.ranks = draw(1, max_ranks), .microbatches = draw(1, max_microbatches)};
  if (kind < ScheduleKind::one_f_one_b || kind == ScheduleKind::interleaved) spec.chunks = draw(1, 4);
  if (kind == ScheduleKind::interleaved && spec.chunks > 1)
    spec.microbatches = spec.ranks * draw(1, std::max(1, max_microbatches / spec.ranks));
  return {kind, spec};
}

namespace {

// Of each stage: costs of a rank are divided over its stages, a transfer takes as long for each of them.
std::vector<Costs> costs_of_stages(const PipelineSchedule& schedule, const std::vector<Costs>& costs) {
  const std::vector<int> chunks = schedule.stages_per_rank();
  std::vector<Costs> stages;
  for (std::size_t stage = 0; stage < schedule.rank_of_stage.size(); ++stage) {
    const auto rank = static_cast<std::size_t>(index(schedule.rank_of_stage[stage]));
    if (costs.size() != 1 && costs.size() != schedule.rows.size()) {
      stages.push_back(costs.at(stage));
      continue;
    }
    const Costs& of_rank = costs.size() == 1 ? costs[0] : costs[rank];
    const double share   = chunks[rank];
    stages.push_back({of_rank.F / share, of_rank.I / share, of_rank.W / share, of_rank.COMM});
  }
  return stages;
}

}  // namespace

std::vector<std::vector<NodeTime>> reference_times(const PipelineSchedule& schedule, const std::vector<Costs>& given) {
  std::vector<std::vector<NodeTime>> times(schedule.rows.size());
  std::map<Action, double> ends;
  const std::vector<Costs> costs = costs_of_stages(schedule, given);
  const int last                 = schedule.num_stages() - 1;
  const auto end_of              = [&](int stage, ActionKind kind, Microbatch microbatch) -> std::optional<double> {
    const auto found = ends.find({Stage{stage}, kind, microbatch});
    return found == ends.end() ? std::nullopt : std::optional(found->second);
  };
  const auto backward_of = [&](int stage, Microbatch microbatch) {
    const auto split = end_of(stage, ActionKind::input_gradient, microbatch);
    return split ? split : end_of(stage, ActionKind::backward, microbatch);
  };
  const auto arrival = [&](std::optional<double> end, int from, Rank to) {
    const Rank sender = schedule.rank_of_stage[static_cast<std::size_t>(from)];
    if (end && sender != to) *end += costs[static_cast<std::size_t>(from)].COMM;
    return end;
  };
  for (bool progress = true; progress;) {
    progress = false;
    for (std::size_t r = 0; r < schedule.rows.size(); ++r) {
      if (times[r].size() == schedule.rows[r].size()) continue;
      const Action action = schedule.rows[r][times[r].size()];
      const int s         = index(action.stage);
      const Rank rank{static_cast<int>(r)};
      std::vector<std::optional<double>> needs{0.0};
      const Costs& of_stage = costs[static_cast<std::size_t>(s)];
      double cost           = 0;
      switch (action.kind) {
        case ActionKind::forward:
          if (s > 0) needs.push_back(arrival(end_of(s - 1, ActionKind::forward, action.microbatch), s - 1, rank));
          cost = of_stage.F;
          break;
        case ActionKind::weight_gradient:
          needs.push_back(end_of(s, ActionKind::input_gradient, action.microbatch));
          cost = of_stage.W;
          break;
        default:
          needs.push_back(end_of(s, ActionKind::forward, action.microbatch));
          if (s < last) needs.push_back(arrival(backward_of(s + 1, action.microbatch), s + 1, rank));
          cost = of_stage.I + (action.kind == ActionKind::backward ? of_stage.W : 0);
      }
      if (std::find(needs.begin(), needs.end(), std::nullopt) != needs.end()) continue;
      double begin = times[r].empty() ? 0 : times[r].back().end_s;
      for (const auto& need : needs) begin = std::max(begin, *need);
      times[r].push_back({begin, begin + cost});
      ends[action] = times[r].back().end_s;
      progress     = true;
    }
  }
  return times;
}

ReferenceResult reference_result(const PipelineSchedule& schedule, const std::vector<Costs>& given, double retain) {
  const auto times               = reference_times(schedule, given);
  const std::vector<Costs> costs = costs_of_stages(schedule, given);
  ReferenceResult result{.complete = true};
  double most_work = 0;
  for (std::size_t rank = 0; rank < times.size(); ++rank) {
    const std::vector<Action>& row = schedule.rows[rank];
    if (times[rank].size() != row.size()) return {};
    result.longest_span = std::max(result.longest_span, times[rank].back().end_s - times[rank].front().begin_s);
    result.makespan     = std::max(result.makespan, times[rank].back().end_s);
    double work         = 0;
    int stages          = 0;
    for (std::size_t stage = 0; stage < costs.size(); ++stage) {
      if (index(schedule.rank_of_stage[stage]) != static_cast<int>(rank)) continue;
      work += schedule.num_microbatches * (costs[stage].F + costs[stage].I + costs[stage].W);
      ++stages;
    }
    most_work = std::max(most_work, work);
    // A rank does one action at a time, so its row has the changes of its memory in the order of time.
    const double unit = 1.0 / stages;
    double held = 0, peak = 0;
    for (const Action& action : row) {
      if (action.kind == ActionKind::forward) held += unit;
      peak = std::max(peak, held);
      if (action.kind == ActionKind::input_gradient) held -= (1 - retain) * unit;
      if (action.kind == ActionKind::weight_gradient) held -= retain * unit;
      if (action.kind == ActionKind::backward) held -= unit;
    }
    result.peak_activation.push_back(peak);
  }
  result.bubble_rate = 1 - most_work / result.longest_span;
  return result;
}

}  // namespace stepgraph::testing
