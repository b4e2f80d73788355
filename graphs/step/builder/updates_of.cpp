#include <set>

#include "engine/base/error.hpp"
#include "engine/graph/without_nodes.hpp"
#include "graphs/step/training_step.hpp"

namespace stepgraph {
namespace {

// The nodes of an update bring all data that they need: bytes of a step buffer that they read were written by one of
// them.
void check_complete(const Graph& graph) {
  std::set<std::uint32_t> written;  // buffers
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (std::size_t i = 0; i < graph.num_accesses(Node{node}); ++i) {
      const Graph::AccessView access = graph.access(Node{node}, i);
      const BufferSpec& buffer       = graph.spec(access.buffer);
      if (access.mode != AccessMode::write && buffer.lifetime == Lifetime::step && !buffer.token &&
          access.region.length > 0 && !written.contains(access.buffer.id)) {
        throw Error(
            ErrorKind::graph,
            str("step: ", graph.describe(Node{node}), " of an update reads ", graph.describe(access.buffer),
                ", which no node of an update writes (all nodes of an update have the phase '", update_phase, "')"));
      }
      if (access.mode != AccessMode::read) written.insert(access.buffer.id);
    }
  }
}

}  // namespace

StepGraph updates_of(const StepGraph& step) {
  if (!step.update_first)
    throw Error(ErrorKind::config, "step: its update is at its end, so nothing is left (StepOptions::update_first)");
  const Graph& graph = step.graph;
  StepGraph made     = step;
  made.graph         = without_nodes(graph);
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (graph.labels(Node{i}).phase == update_phase) made.graph.add(graph.spec(Node{i}), graph.body(Node{i}));
  }
  check_complete(made.graph);
  return made;
}

}  // namespace stepgraph
