#include "ops/updates/loss_scale.hpp"

#include <cmath>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/updates/loss_scale.hpp"
#include "ops/tape/op_checks.hpp"

namespace stepgraph {
namespace {

void check_growth(const std::string& op, std::int64_t growth_steps) {
  if (growth_steps < 1) throw Error(ErrorKind::config, str(op, ": growth_steps is ", growth_steps, " (at least 1)"));
}

void shrink_scale(double& scale, std::int64_t& good_steps, bool dynamic) {
  good_steps = 0;
  if (dynamic) scale /= 2;
}

void grow_scale(double& scale, std::int64_t& good_steps, bool dynamic, std::int64_t growth_steps) {
  if (++good_steps < growth_steps) return;
  good_steps = 0;
  if (dynamic) scale *= 2;
}

}  // namespace

Node update_loss_scale(Graph& graph, const UpdateLossScale& spec) {
  const std::string op = str("update_loss_scale '", spec.name, "'");
  check_number(graph, op, "overflow", spec.overflow, DType::i64);
  check_number(graph, op, "scale", spec.scale, DType::f64);
  check_number(graph, op, "good_steps", spec.good_steps, DType::i64);
  check_number(graph, op, "num_updates", spec.num_updates, DType::i64);
  check_growth(op, spec.growth_steps);
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
                     if (context.read<std::int64_t>().front() != 0) return shrink_scale(scale, good_steps, dynamic);
                     ++num_updates;
                     grow_scale(scale, good_steps, dynamic, growth_steps);
                   });
}

Node count_update(Graph& graph, const CountUpdate& spec) {
  const std::string op = str("count_update '", spec.name, "'");
  check_number(graph, op, "factor", spec.factor, DType::f64);
  check_number(graph, op, "set_scale", spec.set_scale, DType::f64);
  check_number(graph, op, "num_updates", spec.num_updates, DType::i64);
  check_growth(op, spec.growth_steps);
  const bool scales = spec.scale.has_value();
  if (scales != spec.good_steps.has_value())
    throw Error(ErrorKind::config, str(op, ": only one of scale and good_steps is given (both, or neither)"));
  AccessList accumulates{spec.num_updates};
  if (scales) {
    check_number(graph, op, "scale", *spec.scale, DType::f64);
    check_number(graph, op, "good_steps", *spec.good_steps, DType::i64);
    accumulates.push_back(*spec.scale);
    accumulates.push_back(*spec.good_steps);
  }
  return graph.add({.name        = spec.name,
                    .reads       = {spec.factor, spec.set_scale},
                    .accumulates = accumulates,
                    .op          = "count_update",
                    .device      = true,
                    .labels      = spec.labels},
                   [scales, dynamic = spec.dynamic, growth_steps = spec.growth_steps](const Context& context) {
                     const auto factor = context.read<double>(0), set_scale = context.read<double>(1);
                     const auto num_updates = context.accumulate<std::int64_t>(0);
                     const auto scale       = scales ? context.accumulate<double>(1) : std::span<double>();
                     const auto good_steps  = scales ? context.accumulate<std::int64_t>(2) : std::span<std::int64_t>();
                     if constexpr (cuda::built) {
                       if (const DeviceQueue* queue = context.device()) {
                         return cuda::count_update(*queue,
                                                   {.factor      = factor.data(),
                                                    .set_scale   = set_scale.data(),
                                                    .scale       = scale.data(),
                                                    .good_steps  = good_steps.data(),
                                                    .num_updates = num_updates.data()},
                                                   dynamic, growth_steps);
                       }
                     }
                     if (std::isnan(set_scale.front())) return;
                     const bool applied = !std::isnan(factor.front());
                     num_updates.front() += applied;
                     if (!scales) return;
                     if (!applied) return shrink_scale(scale.front(), good_steps.front(), dynamic);
                     grow_scale(scale.front(), good_steps.front(), dynamic, growth_steps);
                   });
}

}  // namespace stepgraph
