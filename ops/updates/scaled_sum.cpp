#include "ops/updates/scaled_sum.hpp"

#include "engine/run/context.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/transfers/streams.hpp"
#include "ops/tape/op_checks.hpp"

namespace stepgraph {

Node scaled_sum(Graph& graph, const ScaledSum& spec) {
  check_number(graph, "scaled_sum", "to", spec.to, DType::f64);
  AccessList reads{spec.values};
  if (spec.counted) {
    check_number(graph, "scaled_sum", "ignored", spec.counted->ignored, DType::i64);
    reads.push_back(spec.counted->ignored);
  }
  return graph.add(
      {.name = spec.name, .reads = reads, .writes = spec.to, .op = spec.op, .device = true, .labels = spec.labels},
      [factor = spec.factor, all = spec.counted ? spec.counted->all : 0](const Context& context) {
        const std::span<const double> values = context.read<double>();
        double* const to                     = context.write<double>().data();
        const std::int64_t* const ignored    = all > 0 ? context.read<std::int64_t>(1).data() : nullptr;
        if constexpr (cuda::built) {
          if (const DeviceQueue* queue = context.device())
            return cuda::scaled_sum(*queue, values, {.factor = factor, .all = all, .ignored = ignored}, to);
        }
        double sum = 0;
        for (const double each : values) sum += each;
        if (all == 0) {
          *to = sum * factor;
        } else {
          const std::int64_t counted = all - *ignored;
          *to                        = counted > 0 ? sum * (factor / static_cast<double>(counted)) : 0;
        }
      });
}

}  // namespace stepgraph
