#include "tests/support/schedules.hpp"

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

std::vector<std::vector<NodeTime>> reference_times(const PipelineSchedule& schedule, const std::vector<Costs>& costs) {
  std::vector<std::vector<NodeTime>> times(schedule.rows.size());
  std::map<Action, double> ends;
  const std::vector<int> chunks = schedule.stages_per_rank();
  const int last                = schedule.num_stages() - 1;
  const auto end_of             = [&](int stage, ActionKind kind, Microbatch microbatch) -> std::optional<double> {
    const auto found = ends.find({Stage{stage}, kind, microbatch});
    return found == ends.end() ? std::nullopt : std::optional(found->second);
  };
  const auto backward_of = [&](int stage, Microbatch microbatch) {
    const auto split = end_of(stage, ActionKind::input_gradient, microbatch);
    return split ? split : end_of(stage, ActionKind::backward, microbatch);
  };
  const auto arrival = [&](std::optional<double> end, int from, Rank to) {
    const Rank sender = schedule.rank_of_stage[static_cast<std::size_t>(from)];
    if (end && sender != to) *end += costs[static_cast<std::size_t>(index(sender))].COMM;
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
      double cost = 0;
      switch (action.kind) {
        case ActionKind::forward:
          if (s > 0) needs.push_back(arrival(end_of(s - 1, ActionKind::forward, action.microbatch), s - 1, rank));
          cost = costs[r].F;
          break;
        case ActionKind::weight_gradient:
          needs.push_back(end_of(s, ActionKind::input_gradient, action.microbatch));
          cost = costs[r].W;
          break;
        default:
          needs.push_back(end_of(s, ActionKind::forward, action.microbatch));
          if (s < last) needs.push_back(arrival(backward_of(s + 1, action.microbatch), s + 1, rank));
          cost = costs[r].I + (action.kind == ActionKind::backward ? costs[r].W : 0);
      }
      if (std::find(needs.begin(), needs.end(), std::nullopt) != needs.end()) continue;
      double begin = times[r].empty() ? 0 : times[r].back().end_s;
      for (const auto& need : needs) begin = std::max(begin, *need);
      times[r].push_back({begin, begin + cost / chunks[r]});
      ends[action] = times[r].back().end_s;
      progress     = true;
    }
  }
  return times;
}

}  // namespace stepgraph::testing
