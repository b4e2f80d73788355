#include "engine/run/world.hpp"

#include <numeric>

#include "engine/plan/workspaces.hpp"
#include "engine/run/device.hpp"

namespace stepgraph {

bool is_for_parts(LaneKind kind) noexcept {
  switch (kind) {
    case LaneKind::tp:
    case LaneKind::gather:
    case LaneKind::reduce:
    case LaneKind::pp_send:
    case LaneKind::pp_recv:
      return true;
    default:
      return false;
  }
}

std::vector<std::uint32_t> World::prepare(const Graph&, std::span<const Communicator> groups) {
  std::vector<std::uint32_t> numbers(groups.size());
  std::iota(numbers.begin(), numbers.end(), std::uint32_t{0});
  return numbers;
}

std::int64_t device_memory_bytes(const World& world) {
  if (world.device() == nullptr) return 0;
  std::int64_t least = 0;
  for (const Rank rank : world.local_ranks()) {
    const std::int64_t bytes = world.device()->memory().size_bytes(rank);
    if (least == 0 || bytes < least) least = bytes;
  }
  return least;
}

WorkspaceNeeds workspace_needs(const World& world) {
  if (world.device() == nullptr) return {};
  return {.bodies = true,
          .part   = [&world](const Graph& graph, Node part) { return world.part_workspace(graph, part); }};
}

void World::communicate_batch(const Context& context, std::span<const Exchange> batch) {
  for (const Exchange& exchange : batch) communicate(context, exchange);
}

}  // namespace stepgraph
