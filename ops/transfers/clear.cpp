#include "ops/transfers/clear.hpp"

#include <algorithm>

#include "engine/run/context.hpp"
#include "ops/cuda/common/built.hpp"
#include "ops/cuda/transfers/streams.hpp"

namespace stepgraph {

Node clear(Graph& graph, const Clear& spec) {
  std::optional<Lane> lane;
  if (spec.lane) lane = graph.lane(graph.spec(spec.values.buffer).rank, *spec.lane);
  return graph.add(
      {.name = spec.name, .lane = lane, .writes = spec.values, .op = "clear", .device = true, .labels = spec.labels},
      [](const Context& context) {
        const std::span<std::byte> bytes = context.write<std::byte>();
        if constexpr (cuda::built) {
          if (const DeviceQueue* queue = context.device()) return cuda::clear(*queue, bytes);
        }
        std::fill(bytes.begin(), bytes.end(), std::byte{0});
      });
}

}  // namespace stepgraph
