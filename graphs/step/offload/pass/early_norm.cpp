#include "graphs/step/offload/pass/early_norm.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace stepgraph::offload {
namespace {

constexpr std::uint32_t no_node = ~std::uint32_t{0};

}  // namespace

NodeOrder with_early_norms(const Graph& graph, const std::vector<bool>& is_offloaded_gradient) {
  NodeOrder order;
  order.nodes.resize(graph.num_nodes());
  std::iota(order.nodes.begin(), order.nodes.end(), 0);
  order.like = order.nodes;

  using Place = std::tuple<std::uint32_t, int>;  // a node; -1: before it, 0: the node itself, 1: after it
  std::vector<Place> places;
  places.reserve(order.nodes.size());
  for (const std::uint32_t node : order.nodes) places.emplace_back(node, 0);
  std::map<Rank, std::uint32_t> first_of_rank;
  // By buffer: its last writer so far; its first user, where that is a node that clears it and nothing else.
  std::vector<std::uint32_t> last_writer(graph.num_buffers(), no_node), cleared_by(graph.num_buffers(), no_node);
  std::vector<bool> is_used(graph.num_buffers(), false);
  bool moved = false;
  for (const std::uint32_t node : order.nodes) {
    const std::uint32_t first = first_of_rank.try_emplace(graph.rank(Node{node}), node).first->second;
    const std::size_t count   = graph.num_accesses(Node{node});
    if (graph.op(Node{node}) == "square_sum" && count == 2) {
      Buffer values, sum;
      for (std::size_t i = 0; i < count; ++i) {
        const auto access                                = graph.access(Node{node}, i);
        (access.mode == AccessMode::read ? values : sum) = access.buffer;
      }
      const bool can_move = values != Buffer{} && sum != Buffer{} && is_offloaded_gradient[values.id] &&
                            last_writer[values.id] != no_node && cleared_by[sum.id] != no_node;
      if (can_move) {
        places[node]               = {last_writer[values.id], 1};
        order.like[node]           = last_writer[values.id];
        places[cleared_by[sum.id]] = {first, -1};
        moved                      = true;
        continue;  // a later sum does not have to follow this one
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto access = graph.access(Node{node}, i);
      if (writes(access.mode)) last_writer[access.buffer.id] = node;
      if (!is_used[access.buffer.id] && count == 1 && graph.op(Node{node}) == "clear")
        cleared_by[access.buffer.id] = node;
      is_used[access.buffer.id] = true;
    }
  }
  if (moved) {
    std::stable_sort(order.nodes.begin(), order.nodes.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return places[a] < places[b]; });
  }
  return order;
}

}  // namespace stepgraph::offload
