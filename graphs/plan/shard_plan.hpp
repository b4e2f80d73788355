#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "engine/graph/part.hpp"

// How data-parallel ranks shard weights, gradients and optimizer state, as data.
namespace stepgraph {

struct Block;  // graphs/models/model.hpp

// Which tensors are sharded: each rank keeps its shard only. Ops always use whole weights, which are gathered before.
enum class Shard : std::uint8_t {
  none,     // none: gradients are reduced in buckets (DDP)
  zero1,    // optimizer state (ZeRO-1)
  grad_op,  // optimizer state and gradients (ZeRO-2)
  full,     // optimizer state, gradients and weights (ZeRO-3, FSDP)
  hybrid,   // as full, inside groups of `group` ranks; groups are replicas of each other (HSDP)
};
[[nodiscard]] std::string_view to_string(Shard strategy) noexcept;
// The values of weights are sharded, and gathered for each use.
[[nodiscard]] constexpr bool shards_weights(Shard strategy) noexcept {
  return strategy == Shard::full || strategy == Shard::hybrid;
}

// When gradients are reduced: once a step, or after every microbatch into the rank's shard.
enum class ReduceWhen : std::uint8_t { last, each };
[[nodiscard]] std::string_view to_string(ReduceWhen when) noexcept;

// When the backward pass may gather the weights of its next unit: while the current unit computes its gradients
// (backward_pre); after that (backward_post); or, with ReduceWhen::each, after the current unit's gradients are reduced
// (none). A gathering always waits for a free slot.
enum class Prefetch : std::uint8_t { backward_pre, backward_post, none };
[[nodiscard]] std::string_view to_string(Prefetch prefetch) noexcept;

struct ShardPlan {
  Shard strategy        = Shard::none;
  ReduceWhen reduce     = ReduceWhen::last;
  Prefetch prefetch     = Prefetch::backward_pre;
  bool forward_prefetch = true;  // false: the forward pass gathers a unit after the unit before it has computed
  int slots             = 2;     // gathered units in memory at once, where weights are dropped after each use
  int grad_slots        = 2;     // with `each`: units with unreduced gradients in memory at once

  // Which blocks are gathered together: "layer" (each block), "model" (all of a stage), "params:N" (neighbours, until
  // they have N parameters or more), "type:NAME" (each block with a name that begins so, and each run of other blocks).
  // Or unit_of names the unit of each block: neighbouring blocks of a stage with the same name are one unit.
  std::string units                                = "layer";
  std::function<std::string(const Block&)> unit_of = {};
  std::int64_t min_params = 1000;  // smaller weights, and norms in a type of their own, are not sharded
  bool flat = true;  // a unit's weights are concatenated and divided evenly; else each is sharded by its rows
  int group = 0;     // hybrid: ranks of a shard group

  bool reshard_after_forward     = true;
  int reshard_group              = 0;  // more than 1: so many neighbours keep gathered weights for backward, sharded
  bool keep_between_microbatches = false;  // a stage stays gathered from UNSHARD to RESHARD

  // Gradients of weights that are not sharded are reduced in buckets, filled in the order of the backward pass.
  double bucket_mb       = 25;
  double first_bucket_mb = 0;      // 0: the same as bucket_mb
  bool bucket_views      = true;   // gradients lie in their bucket; else they are copied there and back
  bool delay_all_reduce  = false;  // one bucket for each stage, of any size
  // Weights that no op reads have gradients of zeros and are listed in StepGraph::unused; else such a weight is an
  // error. A step is one graph and always uses the same weights, so find_unused_parameters and static_graph do the
  // same.
  bool find_unused_parameters = false;
  bool static_graph           = false;
  Reduction reduction         = Reduction::average;  // sum: gradients are dp times as large

  friend bool operator==(const ShardPlan& a, const ShardPlan& b);  // unit_of is not compared
};

}  // namespace stepgraph
