#include "graphs/step/resolve.hpp"

#include <algorithm>
#include <cmath>

#include "engine/base/error.hpp"
#include "graphs/layout/divisibility.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/models/check_model.hpp"
#include "graphs/step/shard_units.hpp"

namespace stepgraph {
namespace {

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
  return plan;
}

}  // namespace stepgraph
