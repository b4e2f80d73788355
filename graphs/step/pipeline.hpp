#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/simulate/machine.hpp"
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/schedule/graph.hpp"
#include "graphs/schedule/schedule.hpp"
#include "graphs/schedule/search.hpp"

// The pipeline of a step: its schedule, and which blocks of the model each stage has.
namespace stepgraph {

// The schedule of a training step, not lowered: a kind by name, read from a file whose name ends in .csv, or the one
// that was found for `auto` (with_split). Throws Error(config) where it is for another number of ranks or microbatches.
[[nodiscard]] PipelineSchedule schedule_of(const PipelinePlan& plan, int pp, int num_microbatches);

// Stages of each rank, of a schedule that is not read from a file.
[[nodiscard]] int num_chunks(const PipelinePlan& plan);

// The pipeline rank of each stage.
[[nodiscard]] std::vector<Rank> placement_of_stages(const PipelinePlan& plan, int pp);

// The schedule of a forward step, lowered: microbatch by microbatch, with the plan's placement of stages. A stage
// receives its input right before it computes, and sends its output right after.
[[nodiscard]] PipelineSchedule forward_schedule(const PipelinePlan& plan, int pp, int num_microbatches);

// By stage: indices into model.blocks. Layers are divided over the stages, equally or as `split` says; blocks before
// the layers go to the first stage, blocks after them to the last.
[[nodiscard]] std::vector<std::vector<std::size_t>> blocks_of_stages(const Model& model, int num_stages,
                                                                     const std::vector<int>& split = {});

// The costs of each layer for one microbatch of one data-parallel rank. Blocks before the layers count with the first
// layer; blocks after them and the loss count with the last. F, I and W are sums over compute nodes; recomputation
// counts as I; collectives of tensor parallelism are not counted, but its shares are, with sequence parallelism or
// without. Without a machine they are in flops, and COMM is 0.
// With a machine, which can be a calibrated one, they are in seconds.
[[nodiscard]] std::vector<Costs> layer_costs(const Model& model, const Plan& plan, const BatchSpec& batch,
                                             const Machine* machine = nullptr);

// Likewise of each stage of the plan: what `simulate` and the search for a schedule take.
[[nodiscard]] std::vector<Costs> stage_costs(const Model& model, const Plan& plan, const BatchSpec& batch,
                                             const Machine* machine = nullptr);

// PipelinePlan::limit, or limit_bytes in its units: about how many microbatches a rank can hold if its activations may
// take so many bytes of the memory plan. Of the rank that can hold fewest, with the plan's split, and with I and W
// apart. 0: no limit. At least 1, even where that takes more: with I and W joined, one microbatch can take less.
[[nodiscard]] double activation_limit(const Model& model, const Plan& plan, const BatchSpec& batch);

// The activations of the pipeline rank that has most of them at its peak of memory, nothing offloaded. The plan has a
// schedule and a split.
struct PlannedActivations {
  std::int64_t bytes = 0;
  int pp             = 0;
};
[[nodiscard]] PlannedActivations planned_activations(const Model& model, const Plan& plan, const BatchSpec& batch);

// Layers of each stage for which the largest F + I + W of a stage is the least; of those splits the one with the least
// sum of squares. Every stage has a layer. Throws Error(config) with fewer layers than stages.
[[nodiscard]] std::vector<int> balanced_split(const std::vector<Costs>& layers, int num_stages);

struct SplitOptions {
  const Machine* machine = nullptr;  // of layer_costs
  // False: `auto` stays as it is, for steps that only go forward. Its stages are then in looped placement.
  bool search                                          = true;
  std::function<void(const SearchProgress&)> on_search = {};  // ScheduleSearch::on_progress
};

// The plan with the split that PipelinePlan::balanced stands for, and with the schedule that `auto` stands for:
// searched with the costs of the stages and the plan's limit. The clock does not end the search: its work follows from
// the size of the schedule, so the same numbers give the same schedule on machines of one kind. A limit in bytes holds
// for planned_activations: throws Error(config) where no schedule within it is found. Other plans are returned as they
// are.
[[nodiscard]] Plan with_split(const Model& model, const Plan& plan, const BatchSpec& batch,
                              const SplitOptions& options = {});

}  // namespace stepgraph
