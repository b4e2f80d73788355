#include "ops/scaled_sum.hpp"

#include "engine/run/context.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/streams.hpp"
#include "ops/tape/op_checks.hpp"

namespace stepgraph {

Node scaled_sum(Graph& graph, const ScaledSum& spec) {
  check_number(graph, "scaled_sum", "to", spec.to, DType::f64);
  return graph.add({.name   = spec.name,
                    .reads  = spec.values,
                    .writes = spec.to,
                    .op     = spec.op,
                    .device = true,
                    .labels = spec.labels},
                   [factor = spec.factor](const Context& context) {
                     const std::span<const double> values = context.read<double>();
                     double* const to                     = context.write<double>().data();
                     if constexpr (cuda::built) {
                       if (const DeviceQueue* queue = context.device())
                         return cuda::scaled_sum(*queue, values, factor, to);
                     }
                     double sum = 0;
                     for (const double each : values) sum += each;
                     *to = sum * factor;
                   });
}

}  // namespace stepgraph
