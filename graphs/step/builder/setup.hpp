#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "graphs/step/shard/weight_slots.hpp"
#include "graphs/step/shard_units.hpp"
#include "graphs/step/step_graph.hpp"

// The state that all ranks of a step share while it is built: internal to graphs/.
namespace stepgraph {

// The most nodes of a step, so that a step which would take all memory is refused before it is built. With its
// accesses, edges and place in the memory plan a node takes 1.5 to 3 KiB.
inline constexpr int max_step_nodes = 1 << 21;

struct StepSetup {
  // `resolved`: see graphs/step/builder/resolve.hpp.
  StepSetup(const Model& model, const Plan& resolved, const BatchSpec& batch, bool trains, const StepOptions& options);

  // Communicators. All are made at the start and in one order, so a rank that is built alone has the same ones as in
  // the whole step.
  [[nodiscard]] Group group(Rank rank, Axes axes, std::string_view purpose) const;
  [[nodiscard]] Group transfer_group(int from_stage, int to_stage, const Coord& coord) const;
  [[nodiscard]] Group shared_group(int num_holders,
                                   const Coord& coord) const;  // ranks that hold the same piece of a weight
  [[nodiscard]] Group tied_group(const WeightSpec& weight, const Coord& coord) const;
  // The ranks of a shard group; the ranks with the same shard in other groups; the neighbours that keep gathered
  // weights for the backward pass; and the ranks that together sum the norm of one whole model.
  [[nodiscard]] Group shard_group(const Coord& coord, std::string_view purpose) const;
  [[nodiscard]] Group replica_group(const Coord& coord) const;
  [[nodiscard]] Group reshard_group(const Coord& coord) const;
  [[nodiscard]] Group norm_group(const Coord& coord) const;
  [[nodiscard]] ShardGroup norm_sharers(int dp_index) const;  // the data-parallel ranks that sum a norm together

  // The shard units of all stages, made once for each tensor-parallel index.
  using Units = std::vector<std::shared_ptr<const ShardUnit>>;
  [[nodiscard]] const Units& units(int tp_index);

  [[nodiscard]] Rank rank_of(Stage stage, Coord coord) const;  // the rank of the stage with coord's dp and tp
  [[nodiscard]] int num_stages() const { return step.schedule.num_stages(); }
  [[nodiscard]] bool is_last(Stage stage) const { return index(stage) + 1 == num_stages(); }
  // Tokens of a microbatch; and rows of what goes from block to block: those, or with sequence parallelism a rank's
  // share.
  [[nodiscard]] std::int64_t num_tokens() const { return std::int64_t{step.batch.micro} * step.batch.seq; }
  [[nodiscard]] bool sequence_parallel() const { return plan.layout.sequence_parallel && plan.layout.tp > 1; }
  [[nodiscard]] std::int64_t activation_rows() const {
    return sequence_parallel() ? num_tokens() / plan.layout.tp : num_tokens();
  }

  [[nodiscard]] const WeightSpec& weight_named(const std::string& name) const;  // of the model

  StepGraph step;
  Plan plan;  // resolved
  StepOptions options;
  std::vector<std::vector<std::size_t>> blocks_of_stage = {};
  std::map<std::string, Stage> stage_of_weight          = {};
  SlotPlan slots = {};  // whole weights and gradients that with_slots gives memory to

 private:
  void make_groups(bool trains);
  void make_shard_groups(bool trains);
  void make_replica_groups(int replica, const std::vector<Coord>& held, const std::set<int>& shared, bool trains);
  void make_group(std::string name, RankList ranks);

  std::map<std::string, Group> groups_;
  std::map<int, Units> units_;  // by tensor-parallel index
};

}  // namespace stepgraph
