#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/ordered_graph.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/simulate/traffic.hpp"

// What a graph asks of a machine: internal to the simulator.
namespace stepgraph::simulator {

inline constexpr std::uint32_t none = ~std::uint32_t{0};

// What is simulated: a node, or the parts that meet in one communication. Numbered by their lowest nodes, ascending.
// Rows are compressed: the nodes of activity i are nodes[node_begin[i] .. node_begin[i + 1]).
struct Activities {
  std::vector<std::uint32_t> node_begin{0}, nodes;
  std::vector<std::uint32_t> of_node;
  std::vector<std::uint32_t> num_before;          // edges that lead into it
  std::vector<std::uint32_t> after_begin, after;  // where edges lead to, ascending

  struct Time {
    double fixed_s = 0;  // overhead and latency: nothing shortens or stretches it
    double own_s   = 0;  // then its own work, by one worker that shares nothing
    double help    = 1;  // of one idle worker, against that of its own
  };
  std::vector<Time> times;
  std::vector<std::uint32_t> demand_begin{0};
  std::vector<Demand> demands;  // what its work moves over shared resources
  std::vector<bool> helped;     // idle workers of its pools join in its work, or just make it faster

  // Pools that it takes a worker of. Most take of one pool or none, so the rest are kept apart.
  std::vector<std::int32_t> pool;  // -1: none; below: -2 - i for row i of `pools`
  std::vector<std::uint32_t> pools_begin{0};
  std::vector<std::int32_t> pools;

  std::vector<double> capacities;  // of all resources, per second: buses, then the links of the network

  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(node_begin.size() - 1); }
  [[nodiscard]] std::span<const std::uint32_t> nodes_of(std::uint32_t i) const {
    return std::span(nodes).subspan(node_begin[i], node_begin[i + 1] - node_begin[i]);
  }
  [[nodiscard]] std::span<const std::uint32_t> after_of(std::uint32_t i) const {
    return std::span(after).subspan(after_begin[i], after_begin[i + 1] - after_begin[i]);
  }
  [[nodiscard]] std::span<const Demand> demands_of(std::uint32_t i) const {
    return std::span(demands).subspan(demand_begin[i], demand_begin[i + 1] - demand_begin[i]);
  }
  [[nodiscard]] bool takes_several_pools(std::uint32_t i) const { return pool[i] < -1; }
  [[nodiscard]] std::span<const std::int32_t> pools_of(std::uint32_t i) const {
    if (pool[i] == -1) return {};
    if (pool[i] >= 0) return std::span(&pool[i], 1);
    const auto row = static_cast<std::size_t>(-2 - pool[i]);
    return std::span(pools).subspan(pools_begin[row], pools_begin[row + 1] - pools_begin[row]);
  }
};

// Throws Error(config) when the machine or the edges do not fit the graph, Error(graph) when a part lacks those it
// should meet or a cost is no number.
[[nodiscard]] Activities activities_of(const OrderedGraph& graph, const Machine& machine);

}  // namespace stepgraph::simulator
