#pragma once
#include <optional>
#include <string>
#include <vector>

#include "graphs/layout/flat_shards.hpp"
#include "graphs/layout/index_range.hpp"
#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/schedule/schedule.hpp"

// Which weights are gathered together, and who keeps which part of them.
namespace stepgraph {

// Data-parallel ranks that keep one whole between them, `size` neighbours; of those there are dp / size.
struct ShardGroup {
  int size    = 1;
  int member  = 0;  // this rank's place in it
  int replica = 0;  // which of them
};
[[nodiscard]] ShardGroup shard_group(const Plan& plan, int dp_index);

// A weight of a unit: which elements each member of the shard group keeps. Elements are counted on one tensor-parallel
// rank.
struct ShardedWeight {
  std::size_t block = 0, number = 0;       // of the model
  std::int64_t elements          = 0;      // on one rank, whole
  std::int64_t offset            = 0;      // where it begins in the gathered unit, in elements
  bool flat                      = false;  // it lies in the unit's flat
  std::vector<IndexRange> ranges = {};     // by member of the shard group
};

// Weights that are gathered and reduced together: blocks of one stage, neighbours. Gathered, it is its flat, if it has
// one, and then its other weights, each of which is in the same hands elsewhere too: one whose gradient tensor-parallel
// ranks add up is cut by its rows, one that is tied to another as that one is.
struct ShardUnit {
  std::string name                   = {};
  Stage stage                        = {};
  int layer                          = -1;  // where it is one layer
  std::vector<ShardedWeight> weights = {};
  std::optional<FlatShards> flat     = {};
  std::int64_t elements              = 0;  // gathered, padding included
};

// Throws Error(config) where the plan's policy fits nothing or splits what lies between.
[[nodiscard]] std::vector<ShardUnit> shard_units(const Model& model, const Plan& plan,
                                                 const std::vector<std::vector<std::size_t>>& blocks_of_stage,
                                                 int tp_index);

// Throws Error(config) where fields of the plan do not go together; where its units are none of the model's.
void check_shard_plan(const Plan& plan);
void check_units(const Model& model, const ShardPlan& plan);
// Throws Error(config) where a field has another value than it usually has, and others leave it nothing to do: `slots`
// where no weights are gathered. For what people write; a program may vary one field and leave the others alone.
void check_shard_keys(const ShardPlan& plan);
// Whether a unit's weights stay from one use to the next, each in a place of its own, rather than in slots.
[[nodiscard]] bool keeps_gathered(const ShardPlan& plan);

}  // namespace stepgraph
