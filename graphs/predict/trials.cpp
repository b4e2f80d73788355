#include "graphs/predict/trials.hpp"

#include "engine/graph/without_nodes.hpp"
#include "graphs/files/token_data.hpp"

namespace stepgraph::trials {

void set_some_weights(StepRun& run) {
  run.set_weights([](const std::string&, const TensorShape&, const Init& init, std::span<double> values) {
    std::uint32_t bits = 12345;
    for (double& value : values) {
      bits  = bits * 1664525 + 1013904223;
      value = init.deviation == 0 ? init.constant : init.deviation * 3.4 * (bits / 4294967296.0 - 0.5);
    }
  });
}

std::vector<std::int32_t> some_tokens(const Trial& trial) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(trial.batch.global * trial.batch.seq) + 1);
  TokenData(SyntheticTokens{}, trial.model.vocab).read(0, tokens);
  return tokens;
}

Graph with_nodes(const Graph& graph, const std::function<void(NodeSpec&)>& change) {
  Graph made = without_nodes(graph);
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    NodeSpec spec = graph.spec(Node{i});
    change(spec);
    made.add(spec, graph.body(Node{i}));
  }
  return made;
}

}  // namespace stepgraph::trials
