#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "engine/graph/part.hpp"

// How the state of training is shared by data-parallel ranks, as data.
namespace stepgraph {

struct Block;  // graphs/models/model.hpp

// What each rank keeps only a share of. Weights are whole wherever they are used: they are gathered before.
enum class Shard : std::uint8_t {
  none,     // nothing: gradients are reduced in buckets (DDP)
  zero1,    // the optimizer's state
  grad_op,  // that, and gradients
  full,     // that, and weights
  hybrid,   // all of it inside groups of `group` ranks, each of which has a whole
};
[[nodiscard]] std::string_view to_string(Shard strategy) noexcept;
// The values of weights are sharded, and gathered for each use.
[[nodiscard]] constexpr bool shards_weights(Shard strategy) noexcept {
  return strategy == Shard::full || strategy == Shard::hybrid;
}

// When gradients are reduced: once a step, or after every microbatch into the rank's share.
enum class ReduceWhen : std::uint8_t { last, each };
[[nodiscard]] std::string_view to_string(ReduceWhen when) noexcept;

// How early the weights of the unit that is next in the backward pass may be gathered: while the one before it computes
// its gradients; when it has; or, where they are reduced after each microbatch, when they are. Nothing is ever gathered
// earlier than a slot is free.
enum class Prefetch : std::uint8_t { backward_pre, backward_post, none };
[[nodiscard]] std::string_view to_string(Prefetch prefetch) noexcept;

struct ShardPlan {
  Shard strategy        = Shard::none;
  ReduceWhen reduce     = ReduceWhen::last;
  Prefetch prefetch     = Prefetch::backward_pre;
  bool forward_prefetch = true;  // false: the next unit is gathered when the one before it has computed
  int slots             = 2;     // gathered units alive at once, where weights are dropped after each use
  int grad_slots        = 2;     // with `each`: gradients of units that are not reduced yet

  // Which blocks are gathered together: "layer" (each block), "model" (all of a stage), "params:N" (neighbours, until
  // they have N parameters or more), "type:NAME" (each block whose name begins so, and each run of others in between).
  // Or a function's choice: neighbours of a stage with the same name are one.
  std::string units                                = "layer";
  std::function<std::string(const Block&)> unit_of = {};
  std::int64_t min_params = 1000;  // smaller weights, and norms in a type of their own, stay whole everywhere
  bool flat               = true;  // a unit's weights are laid end to end and cut; else each is cut by its rows
  int group               = 0;     // hybrid: ranks that share one whole

  bool reshard_after_forward     = true;
  int reshard_group              = 0;      // more than 1: for backward, so many neighbours keep a whole between them
  bool keep_between_microbatches = false;  // a stage stays gathered from UNSHARD to RESHARD

  // Gradients of weights that are whole everywhere travel in buckets, filled in the order of the backward pass.
  double bucket_mb       = 25;
  double first_bucket_mb = 0;      // 0: as the others
  bool bucket_views      = true;   // gradients lie in their bucket; else they are copied there and back
  bool delay_all_reduce  = false;  // one bucket for each stage, however large
  // Weights that no op reads take part with zeros, and are named (StepGraph::unused); else they are refused. A step is
  // one graph, built once: which weights it uses never changes, so that both allow it.
  bool find_unused_parameters = false;
  bool static_graph           = false;
  Reduction reduction         = Reduction::average;  // sum: gradients are dp times as large

  friend bool operator==(const ShardPlan& a, const ShardPlan& b);  // functions aside
};

}  // namespace stepgraph
