#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "engine/graph/graph.hpp"
#include "engine/simulate/machine.hpp"

// The network traffic of a communication. Internal to the simulator.
namespace stepgraph::simulator {

// The bytes between members: bytes * sends[i] * takes[j] from member i to each other member j, plus the messages in
// `pairs`. Because of the product form, the work per link does not depend on the number of members.
struct Traffic {
  struct Pair {
    std::size_t from, to;  // members
    double bytes;
  };
  RankList members;
  std::vector<double> sends, takes;  // by member; 0: it sends or takes nothing
  double bytes = 0;
  std::vector<Pair> pairs;
  double rounds   = 0;  // of messages, each waiting for the previous round
  double messages = 0;  // handled by the busiest member
};

// The traffic of matched parts under the direct algorithm. In a slice, members without a part are assumed to do
// the same as the members present.
[[nodiscard]] Traffic traffic_of(const Graph& graph, std::span<const std::uint32_t> parts);

// Bytes that an activity moves over a resource.
struct Demand {
  std::uint32_t resource;
  double amount;
};

// A machine's switch tree as resources: the uplink of vertex v is first_resource + 2 * v, its downlink one more.
class Network {
 public:
  Network(const Machine& machine, std::uint32_t first_resource);

  // Adds the bytes that the traffic puts on each link of finite bandwidth, by resource. O((members + pairs) * depth).
  void add_demands(const Traffic& traffic, std::vector<Demand>& out);
  // The largest latency of any route from a sending member to a taking member.
  [[nodiscard]] double largest_latency(const Traffic& traffic);

 private:
  struct Below {  // sums over the members below a vertex
    double sends = 0, takes = 0;
    double paired_up = 0, paired_down = 0;      // bytes of pairs on the vertex's links
    double latency_up = -1, latency_down = -1;  // largest latency from a sender, to a taker; -1: none
    std::size_t num_members = 0;
    bool touched            = false;
  };
  void touch(const RankList& members);
  void forget();
  template <class Visit>
  void walk(const Traffic::Pair& pair, const Traffic& traffic, const Visit& visit);

  const std::vector<Machine::Vertex>& tree_;
  std::uint32_t first_resource_;
  std::vector<Below> below_;
  std::vector<std::int32_t> touched_;  // vertices with members below them, from the leaves to the root
};

}  // namespace stepgraph::simulator
