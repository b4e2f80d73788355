#include "graphs/step/asynchronous.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "graphs/step/asynchronous/window_builder.hpp"
#include "graphs/step/builder/build_step.hpp"
#include "graphs/step/training_step.hpp"

namespace stepgraph {

namespace {

void check_offloaded(const OffloadPlan& offload, const auto& refuse) {
  constexpr std::string_view why =
      " with update.mode asynchronous: all ranks use versions of weights and optimizer states in memory (";
  const auto moves = [&](std::string_view key, bool given) {
    if (given) refuse(key, str("true", why, "false, or mode synchronous)"));
  };
  moves("offload.params", offload.params);
  moves("offload.grads", offload.grads);
  moves("offload.optimizer", offload.optimizer);
  moves("offload.activations", offload.activations);
  if (offload.moves_something()) refuse("offload.strategy", str(offload.strategy, why, "manual, or mode synchronous)"));
}

// Settings of a reduction, which a window does not have.
void check_reduction(const Plan& plan, const auto& refuse) {
  constexpr std::string_view why = " with update.mode asynchronous: gradients of ranks are never reduced (";
  const ShardPlan usual;
  const ShardPlan& shard = plan.shard;
  if (plan.algorithm != Algorithm::direct) refuse("comm.algorithm", str(plan.algorithm, why, Algorithm::direct, ")"));
  if (shard.reduction != usual.reduction) refuse("shard.reduction", str("sum", why, "average)"));
  if (shard.bucket_mb != usual.bucket_mb) refuse("shard.bucket_mb", str(shard.bucket_mb, why, usual.bucket_mb, ")"));
  if (shard.first_bucket_mb != usual.first_bucket_mb)
    refuse("shard.first_bucket_mb", str(shard.first_bucket_mb, why, usual.first_bucket_mb, ")"));
  if (shard.bucket_views != usual.bucket_views) refuse("shard.bucket_views", str("false", why, "true)"));
  if (shard.delay_all_reduce != usual.delay_all_reduce) refuse("shard.delay_all_reduce", str("true", why, "false)"));
  PrecisionPlan precision = plan.precision;
  precision.reduce.reset();
  if (plan.precision.reduce_type() != precision.reduce_type())
    refuse("precision.reduce",
           str(config_name(plan.precision.reduce_type()), why, config_name(precision.reduce_type()), ")"));
}

}  // namespace

void check_asynchronous(const Plan& plan, const StepOptions& options) {
  const auto refuse = [](std::string_view key, const std::string& why) {
    throw Error(ErrorKind::config, str(key, ": ", why));
  };
  const auto alone = [&](std::string_view key, int degree) {
    if (degree > 1)
      refuse(key, str(degree,
                      " with update.mode asynchronous: each data-parallel rank takes and gives whole weights (1, "
                      "or mode synchronous or stale)"));
  };
  alone("layout.tp", plan.layout.tp);
  alone("layout.pp", plan.layout.pp);
  if (plan.shard.strategy != Shard::none)
    refuse("shard.strategy", str(to_string(plan.shard.strategy),
                                 " with update.mode asynchronous: shards are gathered by all ranks together (none, or "
                                 "mode synchronous or stale)"));
  check_offloaded(plan.offload, refuse);
  if (plan.recompute == Recompute::automatic)
    refuse("recompute", "auto with update.mode asynchronous: windows are not simulated (none, selective or full)");
  check_reduction(plan, refuse);
  if (options.keep_gradients)
    refuse("update.mode", "asynchronous: there is no gradient of the whole batch that could be kept (synchronous)");
  if (options.update_first)
    refuse("update.mode", "asynchronous: gradients are applied when they arrive, not in the next step (synchronous)");
  if (options.window < 1 || options.window > most_window_steps)
    refuse("StepOptions::window", str(options.window, " steps (1 to ", most_window_steps, ")"));
}

int usual_window(const Model& model, const Plan& plan, const BatchSpec& batch) {
  constexpr int most_steps    = 16;
  constexpr double most_nodes = 1 << 17;
  if (plan.update.mode != UpdateWhen::asynchronous) return 1;
  constexpr double nodes_of_block = 18;  // for one microbatch, about
  const double nodes = nodes_of_block * static_cast<double>(model.blocks.size()) * batch.global / batch.micro;
  return static_cast<int>(std::clamp(most_nodes / nodes, 1.0, static_cast<double>(most_steps)));
}

StepGraph build_asynchronous_window(const Model& model, const Plan& plan, const BatchSpec& batch,
                                    const StepOptions& options) {
  check_asynchronous(plan, options);
  return WindowBuilder(model, plan, batch, options).build();
}

StepGraph asynchronous_window(const Model& model, const Plan& plan, const BatchSpec& batch, int steps,
                              const StepOptions& options) {
  if (plan.update.mode != UpdateWhen::asynchronous)
    throw Error(ErrorKind::config, str("update.mode: ", plan.update.mode, " has no window (asynchronous)"));
  StepOptions window = options;
  window.window      = steps;
  return training_step(model, plan, batch, window);
}

}  // namespace stepgraph
