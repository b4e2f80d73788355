#pragma once
#include <optional>
#include <string>
#include <vector>

#include "graphs/layout/flat_shards.hpp"
#include "graphs/layout/index_range.hpp"
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/schedule/schedule.hpp"

// Shard units: weights that are gathered together, and the ranges of elements that each rank keeps of them.
namespace stepgraph {

// A shard group: `size` neighbouring data-parallel ranks with the shards of one whole. There are dp / size groups,
// which are replicas of each other.
struct ShardGroup {
  int size    = 1;
  int member  = 0;  // this rank's place in its group
  int replica = 0;  // the number of the group
};
[[nodiscard]] ShardGroup shard_group(const Plan& plan, int dp_index);

// A weight of a unit: which elements each member of the shard group keeps. Elements are counted on one tensor-parallel
// rank.
struct ShardedWeight {
  std::size_t block = 0, number = 0;  // of the model
  std::int64_t elements = 0;          // on one rank, whole
  std::int64_t offset   = 0;          // where it begins in the gathered unit, in elements
  bool flat             = false;      // the weight lies in the unit's flat

  // Elements are cut into blocks of `block_elements`, one for each member of the shard group. The weight begins `lead`
  // elements into the first block, so the first and the last members may have fewer elements of it, or none.
  std::int64_t block_elements = 0;
  std::int64_t lead           = 0;
  int num_members             = 1;
  [[nodiscard]] IndexRange range(int member) const noexcept;
  [[nodiscard]] bool is_even() const noexcept;  // all members have equally many elements
};

// The weights of neighbouring blocks of one stage, which are gathered and reduced together. A gathered unit is its
// flat, if it has one, followed by its other weights. Weights lie beside the flat where several ranks must have the
// same shard: a weight with a gradient that tensor-parallel ranks sum is sharded by its rows, a tied weight as the
// weight it is tied to.
struct ShardUnit {
  std::string name                   = {};
  Stage stage                        = {};
  int layer                          = -1;  // of a unit that is one layer
  std::vector<ShardedWeight> weights = {};
  std::optional<FlatShards> flat     = {};
  std::int64_t elements              = 0;  // gathered, padding included
};

// Throws Error(config) where a unit would have blocks that are not neighbours.
[[nodiscard]] std::vector<ShardUnit> shard_units(const Model& model, const Plan& plan,
                                                 const std::vector<std::vector<std::size_t>>& blocks_of_stage,
                                                 int tp_index);

// Throw Error(config) where fields of the plan contradict each other, and where the model has no block of the named
// type.
void check_shard_plan(const Plan& plan);
void check_units(const Model& model, const ShardPlan& plan);
// Throws Error(config) where a field is not the default and has no effect with the other fields: for example `slots`
// where no weights are gathered. For configs; a program may vary one field and leave the others alone.
void check_shard_keys(const ShardPlan& plan);
// Gathered weights stay in memory from one use to the next, each unit in a buffer of its own instead of in slots.
[[nodiscard]] bool keeps_gathered(const ShardPlan& plan);

}  // namespace stepgraph
