#include "graphs/schedule/simulation.hpp"

#include <algorithm>
#include <numeric>

#include "engine/base/error.hpp"
#include "engine/simulate/simulate.hpp"

namespace stepgraph {

std::vector<double> peak_activations(const PipelineSchedule& schedule, double retain) {
  if (!(retain >= 0 && retain <= 1)) throw Error(ErrorKind::config, str("schedule: retain ", retain, " (0 to 1)"));
  const std::vector<int> chunks = schedule.stages_per_rank();
  std::vector<double> peaks;
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    // Counted in whole stages, so that a peak is exact however many come and go.
    int whole = 0, retained = 0;
    double peak = 0;
    for (const Action& action : schedule.rows[rank]) {
      switch (action.kind) {
        case ActionKind::forward:
          ++whole;
          break;
        case ActionKind::input_gradient:
          --whole;
          ++retained;
          break;
        case ActionKind::weight_gradient:
          --retained;
          break;
        case ActionKind::backward:
          --whole;
          break;
        default:
          break;
      }
      peak = std::max(peak, (whole + retain * retained) / std::max(1, chunks[rank]));
    }
    peaks.push_back(peak);
  }
  return peaks;
}

ScheduleTimeline simulate(const PipelineSchedule& schedule, const ScheduleCosts& costs) {
  ScheduleTimeline result{.peak_activation = peak_activations(schedule, costs.retain)};
  const ScheduleGraph built          = schedule_graph(schedule, costs.costs);
  const Timeline timeline            = simulate(built.graph, schedule_machine(schedule.num_ranks()));
  const std::vector<Costs> of_stages = stage_costs(schedule, costs.costs);
  std::vector<double> work(schedule.rows.size(), 0);  // [rank]
  for (std::size_t stage = 0; stage < of_stages.size(); ++stage) {
    const int rank = index(schedule.rank_of_stage[stage]);
    if (rank >= 0)
      work[static_cast<std::size_t>(rank)] +=
          schedule.num_microbatches * (of_stages[stage].F + of_stages[stage].I + of_stages[stage].W);
  }
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    auto& times  = result.rows.emplace_back();
    double begin = unlimited, end = 0;
    times.reserve(built.nodes[rank].size());
    for (std::size_t i = 0; i < built.nodes[rank].size(); ++i) {
      times.push_back(timeline.nodes[built.nodes[rank][i].id]);
      if (!is_compute(schedule.rows[rank][i].kind)) continue;
      begin = std::min(begin, times.back().begin_s);
      end   = std::max(end, times.back().end_s);
    }
    if (begin < end) result.longest_span = std::max(result.longest_span, end - begin);
  }
  result.makespan    = timeline.makespan_s;
  result.bubble_rate = std::max(0.0, 1 - *std::max_element(work.begin(), work.end()) / result.longest_span);
  result.efficiency =
      std::accumulate(work.begin(), work.end(), 0.0) / (static_cast<double>(work.size()) * result.makespan);
  return result;
}

}  // namespace stepgraph
