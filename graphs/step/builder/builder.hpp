#pragma once
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graphs/models/weights.hpp"
#include "graphs/step/builder/part_node.hpp"
#include "graphs/step/builder/setup.hpp"
#include "graphs/step/builder/weight_storage.hpp"
#include "graphs/step/shard/shard_nodes.hpp"
#include "ops/layers/cross_entropy.hpp"
#include "ops/tape/tape.hpp"

// Builds the nodes of one rank of a step: internal to graphs/. Each rank is built from its own row of the schedule, so
// the cost of building a slice is that of one rank.
namespace stepgraph {

// Bytes of a unit's gradients that no op writes: they are cleared.
struct Cleared {
  std::string weight;
  std::int64_t offset, size;
};

class StepBuilder {
 public:
  StepBuilder(StepSetup& setup, Rank rank);

  void training();
  void forward_only(ForwardResult result);

 private:
  using Key = std::pair<int, int>;  // stage, microbatch
  struct Work {                     // a stage and microbatch that is being built
    std::unique_ptr<Tape> tape;
    Tensor input, output;  // on the tape; the last stage has no output
  };

  // A shard unit, and the buffers that this rank has for it.
  struct Unit {
    std::shared_ptr<const ShardUnit> spec;
    std::vector<std::string> others = {};  // names of weights beside the flat, in the order of the unit
    std::array<Buffer, all_weight_tensors.size()> flats = {};  // by tensor: the flat, or the rank's shard of it
    Buffer whole                                        = {};  // whole weights, which with_slots gives memory to
    Buffer gradients                                    = {};  // whole gradients, where they are reduced once a step
    std::shared_ptr<std::vector<Cleared>> cleared       = {};  // of the microbatch that is being built
    UnitShards accumulated = {};  // with a delayed update and ReduceWhen::each: where this step's gradients are added
    std::vector<std::size_t> weights = {};  // into here().weights, in the unit's order
    int num_reduced                  = 0;

    [[nodiscard]] Buffer& flat(WeightTensor tensor) { return flats[static_cast<std::size_t>(tensor)]; }
    [[nodiscard]] Buffer flat(WeightTensor tensor) const { return flats[static_cast<std::size_t>(tensor)]; }
  };
  // Where a sharded weight is.
  struct UnitWeight {
    std::size_t unit;  // into units_
    const ShardedWeight* weight;
  };
  // Gradients that are reduced together.
  struct Bucket {
    Stage stage;
    std::vector<std::size_t> weights = {};  // into here().weights, in the order of the backward pass
    std::int64_t elements            = 0;
    Buffer buffer                    = {};
    Buffer rounded = {};  // where gradients stay rounded and the update comes first: their sum, made before the update
  };

  // Gradients that become one step older together: those of step s, as this rank has accumulated them.
  struct Accumulated {
    Buffer older      = {};  // those of step s - 1
    Stage stage       = {};
    AccessList ranges = {};  // where ops add to them
  };
  // Reduced gradients that wait for their update: where they are when they are one step old, and copies by age, from 2
  // steps on.
  struct Reduced {
    AccessList ranges         = {};
    Stage stage               = {};
    std::vector<Buffer> older = {};
  };

  void declare_inputs(bool trains, ForwardResult result);
  void declare_weights(bool trains);
  void declare_weight(Stage stage, std::size_t block, std::size_t number, bool trains);
  [[nodiscard]] bool joins_first(const StepWeight& weight) const;
  void share_tied_values();
  [[nodiscard]] const StepWeight* find_weight(const std::string& name);  // by its name in the model; null: not here
  void fill_buckets();
  void add_to_table();
  void add_slots();
  void add_kept(const Unit& unit, UnitValues& values);
  [[nodiscard]] const UnitWeight* unit_weight(const WeightSpec& spec) const;  // null: the weight is not sharded
  StoredRange declare_tensor(const WeightSpec& spec, WeightTensor tensor, const WeightEntry& entry);
  Buffer unit_buffer(Unit& unit, WeightTensor tensor, const WeightEntry& entry);
  [[nodiscard]] Access access(const StoredRange& part) const;
  [[nodiscard]] StoredRange in_piece(const StoredRange& part, const WeightSpec& spec, const TpPiece& piece) const;
  [[nodiscard]] UnitShards shards_of(const Unit& unit, WeightTensor tensor) const;
  [[nodiscard]] Member member(std::string_view purpose, LaneKind lane) const;
  [[nodiscard]] bool shards_values() const { return shards_weights(setup_.plan.shard.strategy); }
  [[nodiscard]] bool gradients_persist() const { return setup_.options.keep_gradients || setup_.options.update_first; }
  [[nodiscard]] bool delays() const { return setup_.plan.update.delays(); }
  [[nodiscard]] bool updates_early() const;
  [[nodiscard]] bool reduces_each() const { return setup_.plan.shard.reduce == ReduceWhen::each; }
  void act(const Action& action, ForwardResult result);

  void forward(const Action& action, ForwardResult result);
  void loss_of(Tape& tape, const Tensor& logits, int microbatch, ForwardResult result);
  void begin_backward(const Action& action);
  void transfer(const Action& action);
  void begin_gradients(const Action& action);
  void end_gradients(const Action& action);
  void check_all_used(Stage stage);
  void reduce_gradients(Stage stage);
  void check_used(const StepWeight& weight);
  void refuse_unused(const StepWeight& weight);  // or lists it in StepGraph::unused, where the plan allows it
  UnitShards incoming_shards(const Unit& unit);
  void join_replicas(const Unit& unit, const Labels& labels);
  void reduce_unit(Unit& unit, const Labels& labels);
  void reduce_bucket(const Bucket& bucket, const Labels& labels);
  Access all_reduce_gradients(const std::string& what, Group group, int members, const Access& values,
                              const Labels& labels, Buffer rounded = {});
  [[nodiscard]] std::string text_of(const Bucket& bucket);
  void join_tensor_parallel(const StepWeight& weight, const Labels& labels);
  [[nodiscard]] CountedTargets counted_targets();
  void sum_losses();

  void add_tied_gradient(const StepWeight& owner, const StepWeight& tied, const Labels& labels);
  void join_tied_weights();
  void join_tied_ranks(const WeightSpec& owner, const std::vector<const WeightSpec*>& tied);
  void add_norm();
  [[nodiscard]] Buffer no_clipping();  // a factor of 1
  void add_loss_scale();
  void add_updates();                    // of all weights, at the end of a step
  void update_stage(Stage stage);        // where the update comes first: before the stage's weights are used
  void update_block(std::size_t block);  // likewise
  void update_weight(std::size_t i);     // into here().weights; once
  void add_update(const StepWeight& weight);
  void add_update(const StepWeight& weight, int group, const IndexRange& elements, const std::string& name);
  void gather_updated(const Unit& unit);

  // A delayed update: stale.cpp.
  void declare_sets();
  void keep_accumulated();  // gradients that are reduced are from here on those of the step before
  void reduce_earlier();
  void keep_reduced();
  void count_applied();
  void shift_sets();
  [[nodiscard]] Buffer applied_factor();

  [[nodiscard]] Graph& graph() { return setup_.step.graph; }
  [[nodiscard]] StepRank& here() { return setup_.step.ranks.at(rank_); }
  [[nodiscard]] Key key(const Action& action) const { return {index(action.stage), index(action.microbatch)}; }
  [[nodiscard]] bool has(Stage stage) const { return setup_.rank_of(stage, coord_) == rank_; }
  [[nodiscard]] DType sum_type() const {
    return wide_type(setup_.step.type);
  }  // in which gradients of weights are accumulated
  [[nodiscard]] bool keeps_rounded_gradients() const { return stepgraph::keeps_rounded_gradients(setup_.plan); }
  [[nodiscard]] DType type_of(Buffer buffer) const { return setup_.step.graph.spec(buffer).type; }
  [[nodiscard]] Stage last_stage() const { return Stage{setup_.num_stages() - 1}; }
  Buffer make(std::string name, std::int64_t elements, DType type, Lifetime lifetime,
              MemoryRole role = MemoryRole::other, Space space = Space::device);
  void mark_since(std::uint32_t first, MemoryRole role);  // sets the role of buffers from that number on
  void all_reduce(const std::string& name, Group group, int members, const Access& values, const Labels& labels);

  StepSetup& setup_;
  Rank rank_;
  Coord coord_;
  TensorParallel tp_;
  ShardGroup shard_group_;
  std::vector<Unit> units_;
  std::map<std::string, UnitWeight> unit_weights_;
  std::vector<Bucket> buckets_;
  Buffer no_clipping_;
  Buffer incoming_;
  WeightTable table_;
  std::map<Key, Work> work_;
  std::map<Key, Buffer> received_, received_gradient_;
  Buffer losses_, squares_;
  std::vector<bool> updated_;  // by weight of here()
  // By weight of here(): what its update reads, where that is not StepWeight::gradient.
  std::map<std::size_t, StoredRange> applied_gradients_;
  std::vector<Accumulated> accumulated_;
  std::vector<Reduced> reduced_;
};

}  // namespace stepgraph
