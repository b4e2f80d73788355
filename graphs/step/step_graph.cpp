#include "graphs/step/step_graph.hpp"

#include <algorithm>
#include <map>

#include "engine/base/error.hpp"

namespace stepgraph {
namespace {

bool moves_layer(const std::vector<OffloadedUnit>& units, Rank rank, int layer) {
  const std::string name = str("layer", layer, " ");
  return std::any_of(units.begin(), units.end(), [&](const OffloadedUnit& unit) {
    return unit.of == OffloadClass::activations && unit.rank == rank && unit.unit.starts_with(name);
  });
}

}  // namespace

std::optional<ActivationCounts> StepGraph::activations(std::optional<Rank> rank) const {
  std::map<int, ActivationMode> modes;  // by layer
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const Labels labels = graph.labels(Node{i});
    if (labels.layer < 0 || labels.phase != "forward" || (rank && graph.rank(Node{i}) != *rank)) continue;
    const auto own     = offload.amounts_of.find(graph.rank(Node{i}));
    const auto& chosen = (own == offload.amounts_of.end() ? offload.amounts : own->second).layers;
    if (chosen.empty()) continue;
    ActivationMode& mode = modes[labels.layer];
    mode                 = chosen.at(static_cast<std::size_t>(labels.layer));
    if (mode == ActivationMode::offload && !moves_layer(offload.units, graph.rank(Node{i}), labels.layer))
      mode = ActivationMode::keep;
  }
  if (modes.empty()) return std::nullopt;
  ActivationCounts counts;
  for (const auto& [layer, mode] : modes) {
    ++(mode == ActivationMode::keep        ? counts.kept
       : mode == ActivationMode::recompute ? counts.recomputed
                                           : counts.offloaded);
  }
  return counts;
}

const HomeFormat* StepGraph::home(Buffer buffer) const {
  const auto found = std::find_if(homes.begin(), homes.end(), [&](const HomeFormat& of) { return of.home == buffer; });
  return found == homes.end() ? nullptr : &*found;
}

DType StepGraph::element_type(Buffer buffer) const {
  const HomeFormat* const format = home(buffer);
  return format == nullptr ? graph.spec(buffer).type : format->type;
}

}  // namespace stepgraph
