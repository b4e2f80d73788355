#include "graphs/step/builder/resolve.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/nearest.hpp"
#include "engine/base/words.hpp"
#include "graphs/layout/divisibility.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/models/check_model.hpp"
#include "graphs/step/shard_units.hpp"

namespace stepgraph {
namespace {

// Every group applies to a tensor.
void check_groups(const OptimizerPlan& optimizer, const Model& model) {
  if (optimizer.groups.empty()) return;
  const ParameterInventory inventory = model.parameters();
  std::vector<bool> applies(optimizer.groups.size() + 1, false), matches(applies);
  std::vector<std::string_view> names;
  for (const Parameter& parameter : inventory.parameters()) {
    names.push_back(parameter.name);
    applies[static_cast<std::size_t>(group_of(optimizer.groups, parameter.name))] = true;
    for (std::size_t i = 0; i < optimizer.groups.size(); ++i) {
      if (group_of({optimizer.groups[i]}, parameter.name) == 1) matches[i + 1] = true;
    }
  }
  for (std::size_t i = 0; i < optimizer.groups.size(); ++i) {
    const OptimizerGroup& group = optimizer.groups[i];
    const auto refuse           = [&](std::string_view key, const std::string& why) {
      throw Error(ErrorKind::config, str("optimizer.groups[", i, "].", key, ": ", why));
    };
    for (const auto& [key, value] : {std::pair("lr", group.lr), std::pair("weight_decay", group.weight_decay)}) {
      if (value && !(std::isfinite(*value) && *value >= 0)) refuse(key, str(*value, " (0 or more)"));
    }
    if (!group.lr && !group.weight_decay)
      refuse("match", str("'", group.match, "' has neither lr nor weight_decay (at least one of them)"));
    if (applies[i + 1]) continue;
    if (matches[i + 1])
      refuse("match", str("'", group.match,
                          "' applies to no tensor: groups before it match all of them (first the "
                          "more special pattern)"));
    const std::vector<std::string_view> near = nearest_names(group.match, names, 3);
    const std::span<const std::string_view> shown =
        near.empty() ? std::span<const std::string_view>(names).first(std::min<std::size_t>(3, names.size()))
                     : std::span<const std::string_view>(near);
    refuse("match", str("'", group.match, "' matches no tensor (", near.empty() ? "the first are: " : "similar: ",
                        join_text(shown, ", ", [](std::string_view name) { return std::string(name); }), ")"));
  }
}

void check_plan(const Model& model, const Plan& plan, const BatchSpec& batch) {
  if (batch.seq < 1) throw Error(ErrorKind::config, str("batch.seq: ", batch.seq, " (at least 1)"));
  if (batch.seq > model.context) {
    throw Error(ErrorKind::config, str("batch.seq: ", batch.seq, " is longer than the model's context of ",
                                       model.context, " (1 to ", model.context, ")"));
  }
  check_shape({batch.micro, batch.seq, std::max(model.width, model.vocab)}, "batch");
  check_tensor_parallel({.tp = plan.layout.tp, .heads = model.heads, .kv_heads = model.kv_heads});
  const auto check_parts = [&](const char* what, std::int64_t size) {
    if (size >= plan.layout.tp) return;
    throw Error(ErrorKind::config, str("layout: tp(", plan.layout.tp, ") is more than ", what, size,
                                       " can be split into (at most ", size, ")"));
  };
  check_parts("a vocabulary of ", model.vocab);
  if (model.inner > 0) check_parts("an MLP of width ", model.inner);  // 0: the model has no MLP
  if (const std::int64_t rows = std::int64_t{batch.micro} * batch.seq;
      plan.layout.sequence_parallel && rows % plan.layout.tp != 0) {
    throw Error(ErrorKind::config, str("layout.sequence_parallel: ", rows, " tokens of a microbatch (batch.micro ",
                                       batch.micro, " x batch.seq ", batch.seq, ") do not divide over tp(",
                                       plan.layout.tp, ") (a multiple of ", plan.layout.tp, ")"));
  }
  check_precision(plan.precision);
  check_offload(plan.offload);
  check_update(plan.update);
  const OptimizerPlan& optimizer = plan.optimizer;
  const auto check               = [](const char* name, double value, bool right, const char* range) {
    if (!right) throw Error(ErrorKind::config, str("optimizer.", name, ": ", value, " (", range, ")"));
  };
  check("lr", optimizer.lr, std::isfinite(optimizer.lr) && optimizer.lr >= 0, "0 or more");
  check("beta1", optimizer.beta1, optimizer.beta1 >= 0 && optimizer.beta1 < 1, "0 or more, below 1");
  check("beta2", optimizer.beta2, optimizer.beta2 >= 0 && optimizer.beta2 < 1, "0 or more, below 1");
  check("eps", optimizer.eps, std::isfinite(optimizer.eps) && optimizer.eps >= 0, "0 or more");
  check("momentum", optimizer.momentum, optimizer.momentum >= 0 && optimizer.momentum < 1, "0 or more, below 1");
  check("weight_decay", optimizer.weight_decay, std::isfinite(optimizer.weight_decay) && optimizer.weight_decay >= 0,
        "0 or more");
  check("clip", optimizer.clip, std::isfinite(optimizer.clip) && optimizer.clip >= 0, "0 or more");
  check_rate_schedule(optimizer.schedule);
  check_groups(optimizer, model);
}

// Offload that does not work with gradients of earlier steps.
void check_delay(const Plan& plan) {
  if (!plan.update.delays()) return;
  const OffloadPlan& offload = plan.offload;
  const auto refuse          = [&](const std::string& why) {
    throw Error(ErrorKind::config, str("update.mode: stale with max_staleness ", plan.update.max_staleness, " ", why));
  };
  if (offload.overlaps_updates())
    refuse("and offload.optimizer with overlap: both move the update to a later step (offload.overlap false)");
  if (offload.may_move(offload.grads))
    refuse(str("keeps gradients of earlier steps on the device, but ",
               offload.grads ? "offload.grads moves them (offload.grads false)"
                             : str("offload.strategy ", to_string(offload.strategy),
                                   " may move them, because no field says what it may move (offload.params or "
                                   "offload.activations true, or strategy manual)")));
}

void check_rounded_sums(const Plan& plan, const BatchSpec& batch) {
  const int microbatches = microbatches_of(plan, batch);
  if (plan.precision.keep_low_precision_grads && plan.shard.reduce == ReduceWhen::each && microbatches > 1) {
    throw Error(ErrorKind::config,
                str("precision.keep_low_precision_grads: true with shard.reduce each and ", microbatches,
                    " microbatches would round the sum after each microbatch (false, or shard.reduce last)"));
  }
}

}  // namespace

int microbatches_of(const Plan& plan, const BatchSpec& batch) {
  return num_microbatches({.global = batch.global, .micro = batch.micro, .dp = plan.layout.dp});
}

Plan resolve(const Plan& given, const Model& model, const BatchSpec& batch, bool trains) {
  static_cast<void>(Layout(given.layout));  // throws for a wrong layout
  Plan plan = given;
  if (!trains) plan.layout.sequence_parallel = false;  // a prompt can have any number of tokens
  check_shard_plan(plan);
  if (!trains) {
    plan.update                          = {};
    plan.shard.reshard_after_forward     = true;
    plan.shard.reshard_group             = 0;
    plan.shard.keep_between_microbatches = false;
  }
  plan.shard.find_unused_parameters = plan.shard.find_unused_parameters || plan.shard.static_graph;
  if (plan.layout.dp == 1) plan.shard = {.find_unused_parameters = plan.shard.find_unused_parameters};
  static_cast<void>(checked_model(model));
  check_units(model, plan.shard);
  check_plan(model, plan, batch);
  check_rounded_sums(plan, batch);
  check_delay(plan);
  return plan;
}

}  // namespace stepgraph
