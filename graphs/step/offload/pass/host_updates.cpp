#include "graphs/step/offload/pass/host_updates.hpp"

#include <set>

#include "engine/base/error.hpp"

namespace stepgraph::offload {
namespace {

constexpr std::int64_t most_mirrored = 4096;  // bytes of a buffer that is copied as a whole, like a scalar

}  // namespace

std::vector<bool> host_nodes(const Graph& graph, const HomeTable& table, const HomePlan& plan) {
  std::set<std::pair<Rank, std::string>> units;
  for (const UnitUpdate& update : plan.updates) {
    if (update.mode == UpdateMode::host) units.emplace(update.rank, update.unit);
  }
  std::vector<bool> on_host(graph.num_nodes(), false);
  if (units.empty()) return on_host;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (graph.has_part(Node{node}) || graph.labels(Node{node}).phase != "update") continue;
    for (std::size_t i = 0; i < graph.num_accesses(Node{node}) && !on_host[node]; ++i) {
      const Graph::AccessView access = graph.access(Node{node}, i);
      const std::uint32_t home       = table.by_buffer[access.buffer.id];
      if (home == none || !writes(access.mode)) continue;
      const Unit& unit = table.unit_of(table.homes[home]);
      on_host[node]    = unit.of == OffloadClass::optimizer && units.contains({unit.rank, unit.name});
    }
  }
  return on_host;
}

void add_staged(const Graph& graph, const std::vector<bool>& on_host, HomeTable& table) {
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (std::size_t i = 0; on_host[node] && i < graph.num_accesses(Node{node}); ++i) {
      const Graph::AccessView access = graph.access(Node{node}, i);
      const BufferSpec& spec         = graph.spec(access.buffer);
      if (table.by_buffer[access.buffer.id] != none || spec.token || spec.space != Space::device) continue;
      const bool is_scalar = spec.size_bytes <= most_mirrored && access.mode == AccessMode::read;
      if (is_scalar) continue;
      table.by_buffer[access.buffer.id] = static_cast<std::uint32_t>(table.homes.size());
      KnownHome known;
      known.buffer = known.home = access.buffer;
      known.type                = spec.type;
      known.space               = Space::device;
      known.unit                = static_cast<std::uint32_t>(table.units.size());
      known.bytes               = spec.size_bytes;
      known.lifetime            = spec.lifetime;
      table.homes.push_back(known);
      table.units.push_back({.rank = spec.rank, .name = spec.name, .staged = true});
    }
  }
}

void run_on_host(Rank rank, NodeSpec& spec) {
  spec.kind            = NodeKind::host;
  spec.lane            = Lane{rank, LaneKind::host};
  spec.device          = false;
  spec.workspace_bytes = 0;
}

}  // namespace stepgraph::offload
