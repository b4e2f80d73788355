#include "engine/plan/memory_peak.hpp"

#include <algorithm>
#include <map>

#include "engine/plan/tenants.hpp"

namespace stepgraph {

MemoryPeak memory_peak(const Graph& graph, const MemoryPlan& plan, Rank rank, Space space) {
  MemoryPeak peak;
  peak.bytes         = plan.arena(rank, space).persistent_bytes;
  const auto is_here = [&](const BufferSpec& buffer) { return buffer.rank == rank && buffer.space == space; };
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& buffer = graph.spec(Buffer{i});
    if (!is_here(buffer) || buffer.token || buffer.lifetime != Lifetime::persistent) continue;
    peak.alive.push_back(Buffer{i});
  }
  std::vector<Tenant> tenants = find_tenants(graph, plan.turns);
  std::erase_if(tenants, [&](const Tenant& tenant) { return !is_here(graph.spec(Buffer{tenant.buffer})); });
  std::map<std::uint32_t, std::int64_t> changes;  // change of the bytes alive, by turn
  for (const Tenant& tenant : tenants) {
    const std::int64_t bytes = MemoryPlan::room_of(graph.spec(Buffer{tenant.buffer}));
    changes[tenant.first] += bytes;
    changes[tenant.last + 1] -= bytes;
  }
  std::int64_t now = 0, most = 0;
  std::uint32_t at = 0;
  for (const auto& [turn, change] : changes) {
    now += change;
    if (now > most) {
      most = now;
      at   = turn;
    }
  }
  peak.bytes += most;
  for (const Tenant& tenant : tenants) {
    if (tenant.first <= at && at <= tenant.last) peak.alive.push_back(Buffer{tenant.buffer});
  }
  std::sort(peak.alive.begin(), peak.alive.end(), [](Buffer a, Buffer b) { return a.id < b.id; });
  for (std::uint32_t i = 0; i < graph.num_nodes() && most > 0 && !peak.node; ++i) {
    if (plan.turns[i] == at && graph.rank(Node{i}) == rank) peak.node = Node{i};
  }
  return peak;
}

}  // namespace stepgraph
