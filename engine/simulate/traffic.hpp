#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/simulate/machine.hpp"

// What a communication puts on a network: internal to the simulator.
namespace stepgraph::simulator {

// Who sends how much to whom: bytes * sends[i] * takes[j] from member i to each other member j, and the messages of
// `pairs`. Products keep the work per link constant, whatever the number of members.
struct Traffic {
  struct Pair {
    std::size_t from, to;  // members
    double bytes;
  };
  std::vector<Rank> members;
  std::vector<double> sends, takes;  // by member; 0: it does not
  double bytes = 0;
  std::vector<Pair> pairs;
  double rounds   = 0;  // of messages that wait for each other
  double messages = 0;  // that the busiest member handles
};

// The traffic of parts that meet, as the direct algorithm has it. Members whose parts are elsewhere (a graph of one
// rank) are taken to do what those present declare.
[[nodiscard]] Traffic traffic_of(const Graph& graph, std::span<const std::uint32_t> parts);

// Bytes that an activity moves over a resource.
struct Demand {
  std::uint32_t resource;
  double amount;
};

// A machine's tree of switches as resources: link up of vertex v is first_resource + 2 * v, the link down one more.
class Network {
 public:
  Network(const Machine& machine, std::uint32_t first_resource);

  // Adds what the traffic demands of each link of finite bandwidth, by resource. O((members + pairs) * depth).
  void add_demands(const Traffic& traffic, std::vector<Demand>& out);
  // The largest latency of a route from one that sends to one that takes.
  [[nodiscard]] double largest_latency(const Traffic& traffic);

 private:
  struct Below {  // of the members below a vertex
    double sends = 0, takes = 0;
    double paired_up = 0, paired_down = 0;      // bytes of pairs over the vertex's links
    double latency_up = -1, latency_down = -1;  // the largest from one that sends and to one that takes; -1: none
    std::size_t num_members = 0;
    bool touched            = false;
  };
  void touch(std::span<const Rank> members);
  void forget();
  template <class Visit>
  void walk(const Traffic::Pair& pair, const Traffic& traffic, const Visit& visit);

  const std::vector<Machine::Vertex>& tree_;
  std::uint32_t first_resource_;
  std::vector<Below> below_;
  std::vector<std::int32_t> touched_;  // vertices with members below them, from the leaves to the root
};

}  // namespace stepgraph::simulator
