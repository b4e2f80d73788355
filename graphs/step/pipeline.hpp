#pragma once
#include <cstddef>
#include <vector>

#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/schedule/schedule.hpp"

// The pipeline of a step: its schedule, and which blocks of the model each stage has.
namespace stepgraph {

// The schedule of a training step, not lowered: a kind by name, or read from a file whose name ends in .csv. Throws
// Error(config) where the file is for another number of ranks or microbatches.
[[nodiscard]] PipelineSchedule schedule_of(const PipelinePlan& plan, int pp, int num_microbatches);

// The schedule of a forward step, lowered: microbatch by microbatch, with the plan's placement of stages. A stage
// receives its input right before it computes, and sends its output right after.
[[nodiscard]] PipelineSchedule forward_schedule(const PipelinePlan& plan, int pp, int num_microbatches);

// By stage: indices into model.blocks. Layers are divided over the stages, equally or as `split` says; blocks before
// the layers go to the first stage, blocks after them to the last.
[[nodiscard]] std::vector<std::vector<std::size_t>> blocks_of_stages(const Model& model, int num_stages,
                                                                     const std::vector<int>& split = {});

}  // namespace stepgraph
