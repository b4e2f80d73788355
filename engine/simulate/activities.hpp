#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/graph/ordered_graph.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/simulate/traffic.hpp"

// The work that a graph puts on a machine. Internal to the simulator.
namespace stepgraph::simulator {

inline constexpr std::uint32_t none = ~std::uint32_t{0};

// The units of simulation: an activity is one node, or the matched parts of one communication. Activities are numbered
// by their lowest node, ascending. Rows are compressed: the nodes of activity i are nodes[node_begin[i] .. node_begin[i
// + 1]).
struct Activities {
  std::vector<std::uint32_t> node_begin{0}, nodes;
  std::vector<std::uint32_t> of_node;
  std::vector<std::uint32_t> num_before;          // number of edges into it
  std::vector<std::uint32_t> after_begin, after;  // successors, ascending

  struct Time {
    double fixed_s  = 0;  // overhead and latency; the same at any speed
    double own_s    = 0;  // then its own work, on one worker that shares nothing
    double alone_s  = 0;  // the same while all other workers of its pools are idle; only if `others` is not 0
    int others      = 0;  // the number of those workers; 0: not measured, each idle worker then adds its own speed
    double paired_s = 0;  // the same with one helper; 0: not measured
    double halved_s = 0;  // the same beside one other node; 0: not measured

    // The share of its own work that is done in a second while `helpers` other workers are idle.
    [[nodiscard]] double speed(double helpers) const {
      if (others == 0) return (1 + helpers) / own_s;
      double low = 0, low_s = own_s, high = others, high_s = alone_s;  // the nearest measured numbers of helpers
      const auto narrow = [&](double measured, double seconds) {
        if (seconds == 0 || measured <= low || measured >= high) return;
        (helpers < measured ? high : low)     = measured;
        (helpers < measured ? high_s : low_s) = seconds;
      };
      narrow(1, paired_s);
      narrow(halved_helpers(others), halved_s);
      const double share = std::min(1.0, (helpers - low) / (high - low));
      return (1 - share) / low_s + share / high_s;
    }
  };
  std::vector<Time> times;
  std::vector<std::uint32_t> demand_begin{0};
  std::vector<Demand> demands;  // bytes that its work moves over shared resources
  // The kind of its lane, if lanes of some kinds slow each other down and its lane is one of these; else -1.
  std::vector<std::int8_t> crowd;
  std::vector<bool> helped;  // idle workers of its pools speed it up, by joining in or by leaving it the memory

  // The pools from which it takes a worker. Most activities use one pool or none, so longer lists are stored apart.
  std::vector<std::int32_t> pool;  // -1: none; -2 - i: row i of `pools`
  std::vector<std::uint32_t> pools_begin{0};
  std::vector<std::int32_t> pools;

  std::vector<double> capacities;  // of all resources, per second: the buses, then the network links

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

// Throws Error(config) if the machine or the edges do not fit the graph, and Error(graph) if a part has no counterpart
// or a cost is not a number.
[[nodiscard]] Activities activities_of(const OrderedGraph& graph, const Machine& machine);

}  // namespace stepgraph::simulator
