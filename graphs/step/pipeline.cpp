#include "graphs/step/pipeline.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "graphs/layout/divisibility.hpp"
#include "graphs/schedule/csv.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/validate.hpp"

namespace stepgraph {
namespace {

// Reads a .csv file. It must have one row for each pipeline rank.
PipelineSchedule read_schedule(const PipelinePlan& plan, int pp) {
  if (plan.chunks != 1) {
    throw Error(ErrorKind::config, str("pipeline.chunks: ", plan.chunks, " with schedule '", plan.schedule,
                                       "' (1: the file assigns stages to ranks)"));
  }
  PipelineSchedule schedule = read_csv(plan.schedule);
  if (schedule.num_ranks() != pp) {
    throw Error(ErrorKind::config, str("pipeline.schedule: '", plan.schedule, "' is for ", schedule.num_ranks(),
                                       " ranks (layout.pp is ", pp, ")"));
  }
  return schedule;
}

}  // namespace

PipelineSchedule schedule_of(const PipelinePlan& plan, int pp, int num_microbatches) {
  if (plan.schedule == "auto") {
    if (!plan.found) throw Error(ErrorKind::config, "pipeline.schedule: auto has not been searched for (with_split)");
    if (plan.found->num_ranks() != pp || plan.found->num_microbatches != num_microbatches) {
      throw Error(ErrorKind::config,
                  str("pipeline.schedule: found for ", plan.found->num_ranks(), " ranks and ",
                      plan.found->num_microbatches, " microbatches, not for ", pp, " and ", num_microbatches));
    }
    return *plan.found;
  }
  if (!plan.schedule.ends_with(".csv")) {
    return pipeline_schedule(parse_schedule_kind(plan.schedule),
                             {.ranks = pp, .microbatches = num_microbatches, .chunks = num_chunks(plan)});
  }
  PipelineSchedule schedule = read_schedule(plan, pp);
  if (schedule.num_microbatches != num_microbatches) {
    throw Error(ErrorKind::config, str("pipeline.schedule: '", plan.schedule, "' is for ", schedule.num_microbatches,
                                       " microbatches (layout and batch make ", num_microbatches, ")"));
  }
  try {
    validate(schedule);
  } catch (const Error& error) {
    throw Error(ErrorKind::config, str("pipeline.schedule: '", plan.schedule, "': ", error.what()));
  }
  return schedule;
}

std::vector<Rank> placement_of_stages(const PipelinePlan& plan, int pp) {
  if (plan.schedule.ends_with(".csv")) return read_schedule(plan, pp).rank_of_stage;
  if (plan.found) return plan.found->rank_of_stage;
  if (plan.schedule == "auto") return looped_placement(pp, num_chunks(plan));  // as many stages
  return placement_of(parse_schedule_kind(plan.schedule), pp, num_chunks(plan));
}

int num_chunks(const PipelinePlan& plan) {
  const auto found =
      std::ranges::find(all_schedule_kinds, plan.schedule, [](ScheduleKind kind) { return to_string(kind); });
  const bool default_of_v = plan.chunks == 1 && found != all_schedule_kinds.end() && is_v_shaped(*found);
  return default_of_v ? usual_chunks(*found) : plan.chunks;
}

PipelineSchedule forward_schedule(const PipelinePlan& plan, int pp, int num_microbatches) {
  const PipelineSchedule whole{.rows             = std::vector<std::vector<Action>>(static_cast<std::size_t>(pp)),
                               .rank_of_stage    = placement_of_stages(plan, pp),
                               .num_microbatches = num_microbatches};
  PipelineSchedule schedule = whole;
  for (int rank = 0; rank < whole.num_ranks(); ++rank) {
    auto& row = schedule.rows[static_cast<std::size_t>(rank)];
    row.clear();
    for (int mb = 0; mb < whole.num_microbatches; ++mb) {
      for (int s = 0; s < whole.num_stages(); ++s) {
        const auto on = [&](int stage) { return index(whole.rank_of_stage[static_cast<std::size_t>(stage)]); };
        if (on(s) != rank) continue;
        const auto add = [&](ActionKind kind) { row.push_back({Stage{s}, kind, Microbatch{mb}}); };
        if (s > 0 && on(s - 1) != rank) add(ActionKind::recv_forward);
        add(ActionKind::forward);
        if (s + 1 < whole.num_stages() && on(s + 1) != rank) add(ActionKind::send_forward);
      }
    }
  }
  return schedule;
}

std::vector<std::vector<std::size_t>> blocks_of_stages(const Model& model, int num_stages,
                                                       const std::vector<int>& split) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::config, str("pipeline: ", model.layers, " layers ", why));
  };
  if (model.layers < num_stages) refuse(str("over ", num_stages, " stages (at most one stage for each layer)"));
  if (std::ranges::any_of(split, [](int layers) { return layers < 1; }))
    refuse("with a stage that has none (pipeline.split: 1 or more for each stage)");
  if (split.empty() && model.layers % num_stages != 0)
    refuse(str("do not divide over ", num_stages, " stages (", multiples_around(model.layers, num_stages),
               " layers, or a schedule with ", divisors_around(model.layers, num_stages), " stages)"));
  const std::vector<int> layers =
      split.empty() ? split_layers(model.layers, num_stages) : split_layers(model.layers, num_stages, split);
  std::vector<std::vector<std::size_t>> stages(static_cast<std::size_t>(num_stages));
  int seen          = 0;
  std::size_t stage = 0;
  int last_of_stage = layers[0];
  for (std::size_t i = 0; i < model.blocks.size(); ++i) {
    if (model.blocks[i].layer >= 0) {
      if (seen == last_of_stage) last_of_stage += layers[++stage];
      ++seen;
    } else if (seen > 0) {
      stage = stages.size() - 1;  // after the layers
    }
    stages[stage].push_back(i);
  }
  return stages;
}

}  // namespace stepgraph
