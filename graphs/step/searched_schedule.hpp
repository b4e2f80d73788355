#pragma once
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/schedule/search.hpp"

namespace stepgraph {

// Sets PipelinePlan::found to the best schedule that is found within the plan's limit. A limit in bytes holds for
// planned_activations: throws Error(config) where no schedule within it is found.
void set_searched_schedule(const Model& model, Plan& plan, const BatchSpec& batch, ScheduleSearch search);

}  // namespace stepgraph
