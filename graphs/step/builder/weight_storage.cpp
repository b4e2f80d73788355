#include "graphs/step/builder/weight_storage.hpp"

#include "engine/base/error.hpp"
#include "ops/tape/number.hpp"

namespace stepgraph {
namespace {

StoredRange StepWeight::*member_of(WeightTensor tensor) noexcept {
  switch (tensor) {
    case WeightTensor::value:
      return &StepWeight::value;
    case WeightTensor::gradient:
      return &StepWeight::gradient;
    case WeightTensor::master:
      return &StepWeight::master;
    case WeightTensor::first_moment:
      return &StepWeight::first;
    case WeightTensor::second_moment:
      break;
  }
  return &StepWeight::second;
}

WeightEntry gradient_entry(const Plan& plan, const WeightTraits& weight, DType sums, Lifetime lifetime) {
  if (!weight.sharded) {
    const bool in_bucket = plan.layout.dp > 1 && plan.shard.bucket_views && !weight.joined_first;
    return {Extent::whole, in_bucket ? Placement::bucket : Placement::own, sums, lifetime};
  }
  if (keeps_rounded_gradients(plan)) {
    return {Extent::shard, weight.flat ? Placement::flat : Placement::own, plan.precision.reduce_type(), lifetime};
  }
  if (plan.shard.strategy == Shard::zero1) return {Extent::shard, Placement::unit, sums, lifetime};
  return {Extent::shard, weight.flat ? Placement::flat : Placement::own, sums, lifetime};
}

}  // namespace

bool keeps_rounded_gradients(const Plan& plan) noexcept {
  return plan.precision.keep_low_precision_grads && plan.layout.dp > 1;
}

WeightEntry weight_entry(const Plan& plan, const WeightTraits& weight, WeightTensor tensor,
                         const WeightStorageOptions& options) {
  const DType type          = weight.norm ? plan.precision.norm_type() : plan.precision.param;
  const DType sums          = wide_type(type);  // of gradients, masters and moments
  const Placement placement = weight.flat ? Placement::flat : Placement::own;
  if (tensor == WeightTensor::value) {
    const bool shards = weight.sharded && shards_weights(plan.shard.strategy);
    return {shards ? Extent::shard : Extent::whole, weight.tied_here ? Placement::tied : placement, type,
            Lifetime::persistent};
  }
  if (!options.trains) return {};
  if (tensor == WeightTensor::gradient) {
    // Of tied weights on one rank, only the owner has an update.
    // With a delayed update the shard of a unit that is reduced once is made beside the passes, and shares no memory
    // with them.
    const bool apart = plan.update.delays() && weight.sharded && plan.shard.reduce == ReduceWhen::last &&
                       (plan.shard.strategy != Shard::zero1 || keeps_rounded_gradients(plan));
    const bool lasts = options.keep_gradients || (options.update_first && !weight.tied_here) || apart;
    return gradient_entry(plan, weight, sums, lasts ? Lifetime::persistent : Lifetime::step);
  }
  const bool absent = weight.tied_here || (tensor == WeightTensor::master && sums == type) ||
                      (tensor == WeightTensor::second_moment && plan.optimizer.kind != OptimizerKind::adamw);
  if (absent) return {};
  return {weight.sharded ? Extent::shard : Extent::whole, placement, sums, Lifetime::persistent};
}

std::string_view to_string(WeightTensor tensor) noexcept {
  constexpr std::array<std::string_view, all_weight_tensors.size()> names{"value", "gradient", "master", "first moment",
                                                                          "second moment"};
  return names[static_cast<std::size_t>(tensor)];
}

std::string to_string(const WeightEntry& entry) {
  constexpr std::array<std::string_view, 3> extents{"none", "whole", "shard"};
  constexpr std::array<std::string_view, 5> placements{"own", "flat", "unit", "bucket", "tied"};
  if (entry.extent == Extent::none) return "none";
  return str(extents[static_cast<std::size_t>(entry.extent)], " ", entry.type, " ", to_string(entry.lifetime), " ",
             to_string(entry.space), " ", placements[static_cast<std::size_t>(entry.placement)]);
}

MemoryRole role_of(WeightTensor tensor) noexcept {
  if (tensor == WeightTensor::value) return MemoryRole::parameters;
  return tensor == WeightTensor::gradient ? MemoryRole::gradients : MemoryRole::optimizer;
}

StoredRange& stored(StepWeight& weight, WeightTensor tensor) noexcept { return weight.*member_of(tensor); }
const StoredRange& stored(const StepWeight& weight, WeightTensor tensor) noexcept { return weight.*member_of(tensor); }

}  // namespace stepgraph
