#include "tests/support/graphs/computing_graph.hpp"

#include <cstring>
#include <set>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "ops/transfers/collectives.hpp"
#include "tests/support/graphs/random_graph.hpp"

namespace stepgraph::testing {
namespace {

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15u + (a << 6) + (a >> 2))) * 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 29);
}

// The step buffers that a node accesses.
std::set<std::uint32_t> step_buffers(const Graph& graph, Node node) {
  std::set<std::uint32_t> buffers;
  for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
    const Graph::AccessView access = graph.access(node, i);
    const BufferSpec& spec         = graph.spec(access.buffer);
    if (!spec.token && spec.lifetime == Lifetime::step && access.region.length > 0) buffers.insert(access.buffer.id);
  }
  return buffers;
}

}  // namespace

void Poisoner::arm(const Graph& graph, Memory& memory) {
  graph_  = &graph;
  memory_ = &memory;
  uses_   = std::vector<Uses>(graph.num_buffers());
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    for (const std::uint32_t buffer : step_buffers(graph, {node})) ++uses_[buffer].left;
  }
}

void Poisoner::done(Node node) {
  if (!graph_) return;
  for (const std::uint32_t buffer : step_buffers(*graph_, node)) {
    if (--uses_[buffer].left > 0) continue;
    std::memset(memory_->data({buffer}), 0xd7, static_cast<std::size_t>(graph_->spec(Buffer{buffer}).size_bytes));
    ++num_poisoned_;
  }
}

void PoisoningWorld::communicate(const Context& context, const Exchange& exchange) {
  inner_.communicate(context, exchange);
  for (const LocalPart& part : exchange.parts) poisoner_.done(part.node);
}

ComputingGraph computing_graph(std::uint64_t seed, const ComputingGraphOptions& options) {
  Random random(seed);
  ComputingGraph out{Graph(options.ranks), {}, std::make_shared<Poisoner>()};
  Graph& graph = out.graph;
  const std::vector<LaneKind> kinds{LaneKind::compute, LaneKind::tp, LaneKind::gather, LaneKind::h2d, LaneKind::host};
  std::vector<Rank> everyone;
  for (int rank = 0; rank < options.ranks; ++rank) everyone.push_back(Rank{rank});
  const Group group = graph.group({.name = "all", .ranks = everyone});
  std::vector<std::vector<Buffer>> made(static_cast<std::size_t>(options.ranks));

  const auto new_buffer = [&](Rank rank, std::int64_t words) {
    return graph.buffer(
        {.name = str("b", graph.num_buffers()), .rank = rank, .size_bytes = 8 * words, .type = DType::i64});
  };
  const auto compute = [&](Rank rank, Buffer to, std::vector<Buffer> from) {
    NodeSpec node{.name = str("n", graph.num_nodes()), .writes = {to}, .rank = rank};
    if (!random.chance(12))
      node.lane = graph.lane(rank, kinds[random.below(static_cast<std::uint64_t>(options.lanes))]);
    for (const Buffer buffer : from) node.reads.push_back(buffer);
    graph.add(node, [count = from.size(), key = graph.num_nodes(), poisoner = out.poisoner](const Context& context) {
      std::uint64_t state = key;
      for (std::size_t i = 0; i < count; ++i) {
        for (const std::int64_t word : context.read<std::int64_t>(i))
          state = mix(state, static_cast<std::uint64_t>(word));
      }
      for (std::int64_t& word : context.write<std::int64_t>(0)) {
        state = mix(state, 1);
        word  = static_cast<std::int64_t>(state);
      }
      poisoner->done(context.node());
    });
  };

  for (int i = 0; i < options.nodes_per_rank * options.ranks; ++i) {
    const Rank rank{static_cast<int>(random.below(static_cast<std::uint64_t>(options.ranks)))};
    std::vector<Buffer>& mine = made[static_cast<std::size_t>(index(rank))];
    const std::int64_t words  = random.between(1, options.max_buffer_bytes / 8);
    if (options.messages && options.ranks > 1 && !mine.empty() && random.chance(15)) {
      Rank to = rank;
      while (to == rank) to = Rank{static_cast<int>(random.below(static_cast<std::uint64_t>(options.ranks)))};
      const Buffer from = mine.back(), copy = new_buffer(to, graph.spec(from).size_bytes / 8);
      send_recv(graph, {.name  = str("m", i),
                        .group = group,
                        .from  = rank,
                        .to    = to,
                        .in    = [=] { return Access(from); },
                        .out   = [=] { return Access(copy); }});
      made[static_cast<std::size_t>(index(to))].push_back(copy);
      continue;
    }
    std::vector<Buffer> from;
    for (std::uint64_t k = random.below(4); k > 0 && !mine.empty(); --k) {
      const auto reach = std::min<std::uint64_t>(mine.size(), static_cast<std::uint64_t>(options.window));
      const Buffer one = mine[mine.size() - 1 - random.below(reach)];
      if (std::find(from.begin(), from.end(), one) == from.end()) from.push_back(one);
    }
    const Buffer to = new_buffer(rank, words);
    compute(rank, to, from);
    mine.push_back(to);
  }
  for (int rank = 0; rank < options.ranks; ++rank) {
    const std::vector<Buffer>& mine = made[static_cast<std::size_t>(rank)];
    out.results.push_back(graph.buffer({.name       = "result",
                                        .rank       = Rank{rank},
                                        .size_bytes = 64,
                                        .type       = DType::i64,
                                        .lifetime   = Lifetime::persistent}));
    std::vector<Buffer> last;
    for (std::size_t i = mine.size() > 12 ? mine.size() - 12 : 0; i < mine.size(); ++i) last.push_back(mine[i]);
    compute(Rank{rank}, out.results.back(), last);
  }
  return out;
}

}  // namespace stepgraph::testing
