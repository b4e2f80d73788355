#include "graphs/plan/shard_plan.hpp"

#include <tuple>

namespace stepgraph {

std::string_view to_string(Shard strategy) noexcept {
  switch (strategy) {
    case Shard::none:
      return "none";
    case Shard::zero1:
      return "zero1";
    case Shard::grad_op:
      return "grad_op";
    case Shard::full:
      return "full";
    case Shard::hybrid:
      return "hybrid";
  }
  return "?";
}

std::string_view to_string(ReduceWhen when) noexcept { return when == ReduceWhen::last ? "last" : "each"; }

std::string_view to_string(Prefetch prefetch) noexcept {
  switch (prefetch) {
    case Prefetch::backward_pre:
      return "backward_pre";
    case Prefetch::backward_post:
      return "backward_post";
    case Prefetch::none:
      return "none";
  }
  return "?";
}

bool operator==(const ShardPlan& a, const ShardPlan& b) {
  const auto fields = [](const ShardPlan& plan) {
    return std::tie(plan.strategy, plan.reduce, plan.prefetch, plan.forward_prefetch, plan.slots, plan.grad_slots,
                    plan.units, plan.min_params, plan.flat, plan.group, plan.reshard_after_forward, plan.reshard_group,
                    plan.keep_between_microbatches, plan.bucket_mb, plan.first_bucket_mb, plan.bucket_views,
                    plan.delay_all_reduce, plan.find_unused_parameters, plan.static_graph, plan.reduction);
  };
  return fields(a) == fields(b);
}

}  // namespace stepgraph
