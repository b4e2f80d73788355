#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graphs/step/shard_units.hpp"
#include "graphs/step/step_graph.hpp"
#include "graphs/step/weight_slots.hpp"

// What all ranks of a step share while it is built: internal to graphs/.
namespace stepgraph {

struct StepSetup {
  // `resolved`: see graphs/step/resolve.hpp.
  StepSetup(const Model& model, const Plan& resolved, const BatchSpec& batch, bool trains, const StepOptions& options);

  // Communicators, by who talks on them. All are made at the start and in one order, so that a rank that is built alone
  // has them as it has them in the whole.
  [[nodiscard]] Group group(Rank rank, Axes axes, std::string_view purpose) const;
  [[nodiscard]] Group transfer_group(int from_stage, int to_stage, const Coord& coord) const;
  [[nodiscard]] Group shared_group(int num_holders, const Coord& coord) const;  // that hold one piece of a weight
  [[nodiscard]] Group tied_group(const WeightSpec& weight, const Coord& coord) const;
  // Of ranks that keep one whole between them; those that have the same part of another whole; neighbours that keep a
  // whole for the backward pass; and all whose parts make one whole model.
  [[nodiscard]] Group shard_group(const Coord& coord, std::string_view purpose) const;
  [[nodiscard]] Group replica_group(const Coord& coord) const;
  [[nodiscard]] Group reshard_group(const Coord& coord) const;
  [[nodiscard]] Group norm_group(const Coord& coord) const;
  [[nodiscard]] ShardGroup norm_sharers(int dp_index) const;  // who sum up the squares of a norm together

  // Units of weights, of all stages: those of one tensor-parallel index are made once, for all ranks that have it.
  using Units = std::vector<std::shared_ptr<const ShardUnit>>;
  [[nodiscard]] const Units& units(int tp_index);

  [[nodiscard]] Rank rank_of(Stage stage, Coord coord) const;  // who has the stage, with coord's dp and tp
  [[nodiscard]] int num_stages() const { return step.schedule.num_stages(); }
  [[nodiscard]] bool is_last(Stage stage) const { return index(stage) + 1 == num_stages(); }
  // Tokens of a microbatch; and rows of what goes from block to block: those, or with sequence parallelism a rank's
  // share.
  [[nodiscard]] std::int64_t num_tokens() const { return std::int64_t{step.batch.micro} * step.batch.seq; }
  [[nodiscard]] bool sequence_parallel() const { return plan.layout.sequence_parallel && plan.layout.tp > 1; }
  [[nodiscard]] std::int64_t activation_rows() const {
    return sequence_parallel() ? num_tokens() / plan.layout.tp : num_tokens();
  }

  StepGraph step;
  Plan plan;  // resolved
  StepOptions options;
  std::vector<std::vector<std::size_t>> blocks_of_stage = {};
  std::map<std::string, Stage> stage_of_weight          = {};
  SlotPlan slots                                        = {};  // what has no memory of its own yet

 private:
  void make_groups(bool trains);
  void make_shard_groups(bool trains);
  void make_group(std::string name, std::vector<Rank> ranks);

  std::map<std::string, Group> groups_;
  std::map<int, Units> units_;  // by tensor-parallel index
};

}  // namespace stepgraph
