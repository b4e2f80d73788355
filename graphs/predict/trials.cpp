#include "graphs/predict/trials.hpp"

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
  Graph made(graph.num_ranks(), graph.ranks());
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& spec = graph.spec(Buffer{i});
    static_cast<void>(spec.token ? made.token(spec.rank, spec.name) : made.buffer(spec));
  }
  for (std::uint32_t i = 0; i < graph.num_groups(); ++i) static_cast<void>(made.group(graph.spec(Group{i})));
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    NodeSpec spec = graph.spec(Node{i});
    change(spec);
    made.add(spec, graph.body(Node{i}));
  }
  return made;
}

}  // namespace stepgraph::trials
