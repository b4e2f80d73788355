#pragma once
#include <array>
#include <iosfwd>
#include <string>
#include <vector>

#include "engine/look/analysis.hpp"

namespace stepgraph {

// The results of all analyses (engine/look/analysis.hpp) of one step, measured or simulated.
struct Summary {
  // Time on the critical path, all nodes of one op together.
  struct OpTime {
    std::string op;  // a part's operation, else the node's op, else its name
    NodeKind kind;
    std::uint32_t num_nodes;
    double seconds;
  };

  double makespan_s       = 0;
  std::vector<Rank> ranks = {};  // those that the graph holds, ascending; a place is an index here
  std::uint32_t num_nodes = 0;
  std::uint32_t num_ran   = 0;

  std::vector<PathStep> critical_path     = {};
  std::array<double, 4> path_s            = {};  // of the nodes on it, by NodeKind
  double path_waiting_s                   = 0;   // and between them
  std::vector<OpTime> path_ops            = {};  // longest first
  std::vector<LaneBusy> lanes             = {};
  std::vector<WorkerBusy> workers         = {};
  std::vector<HiddenCommunication> hidden = {};  // by place
  HiddenCommunication hidden_in_all       = {};  // sums over ranks
  HiddenTransfers transfers_in_all        = {};  // likewise
  std::vector<MemoryUse> memory           = {};
};
[[nodiscard]] Summary summarize(const OrderedGraph& graph, const Timeline& timeline);

// A table for people: one line per rank for up to eight ranks, else minimum, median and maximum.
[[nodiscard]] std::string to_string(const Summary& summary);
std::ostream& operator<<(std::ostream& out, const Summary& summary);

}  // namespace stepgraph
