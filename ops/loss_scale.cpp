#include "ops/loss_scale.hpp"

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/loss_scale.hpp"
#include "ops/tape/op_checks.hpp"

namespace stepgraph {

Node update_loss_scale(Graph& graph, const UpdateLossScale& spec) {
  const std::string op = str("update_loss_scale '", spec.name, "'");
  check_number(graph, op, "overflow", spec.overflow, DType::i64);
  check_number(graph, op, "scale", spec.scale, DType::f64);
  check_number(graph, op, "good_steps", spec.good_steps, DType::i64);
  check_number(graph, op, "num_updates", spec.num_updates, DType::i64);
  if (spec.growth_steps < 1)
    throw Error(ErrorKind::config, str(op, ": growth_steps is ", spec.growth_steps, " (at least 1)"));
  return graph.add({.name        = spec.name,
                    .reads       = spec.overflow,
                    .accumulates = {spec.scale, spec.good_steps, spec.num_updates},
                    .op          = "update_loss_scale",
                    .device      = true,
                    .labels      = spec.labels},
                   [dynamic = spec.dynamic, growth_steps = spec.growth_steps](const Context& context) {
                     if constexpr (cuda::built) {
                       if (const DeviceQueue* queue = context.device()) {
                         return cuda::update_loss_scale(*queue,
                                                        {.overflow    = context.read<std::int64_t>().data(),
                                                         .scale       = context.accumulate<double>(0).data(),
                                                         .good_steps  = context.accumulate<std::int64_t>(1).data(),
                                                         .num_updates = context.accumulate<std::int64_t>(2).data()},
                                                        dynamic, growth_steps);
                       }
                     }
                     double& scale             = context.accumulate<double>(0).front();
                     std::int64_t& good_steps  = context.accumulate<std::int64_t>(1).front();
                     std::int64_t& num_updates = context.accumulate<std::int64_t>(2).front();
                     if (context.read<std::int64_t>().front() != 0) {
                       good_steps = 0;
                       if (dynamic) scale /= 2;
                       return;
                     }
                     ++num_updates;
                     if (++good_steps < growth_steps) return;
                     good_steps = 0;
                     if (dynamic) scale *= 2;
                   });
}

}  // namespace stepgraph
