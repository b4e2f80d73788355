#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graphs/step/offload/homes.hpp"
#include "graphs/step/step_graph.hpp"

// The units of a rank that can be offloaded. Internal to graphs/step/offload.
namespace stepgraph::offload {

// Buffers that move together.
struct Candidate {
  std::string unit            = {};
  std::vector<Buffer> buffers = {};
  std::int64_t bytes          = 0;
  int layer                   = -1;  // of activations; -1: outside of layers
};

// The units of one rank, in the order of the model or of the first use. choose_homes says what a unit is.
struct RankUnits {
  std::array<std::vector<Candidate>, 4> classes = {};
  // The buffers of weights that are tied to a weight of another rank. The copies of both ranks must stay equal, but the
  // ranks use them at different times, and a lossy kind of compression would round them at other points.
  std::set<std::uint32_t> with_copies = {};
  // The buffers of fp32 masters. Weights are rounded from them; rounded masters would lose small updates.
  std::set<std::uint32_t> masters = {};

  [[nodiscard]] const std::vector<Candidate>& of(OffloadClass of) const {
    return classes[static_cast<std::size_t>(of)];
  }
};

// Finds the units of each rank once, for one step or for steps whose passes before offload are the same.
class StepUnits {
 public:
  [[nodiscard]] const RankUnits& of(const StepGraph& step, Rank rank);

 private:
  // What a rank has in the graph.
  struct Parts {
    std::vector<Buffer> buffers;
    std::vector<Node> nodes;
  };
  void find_parts(const Graph& graph);

  std::map<Rank, Parts> parts_;  // of all ranks; empty until units are asked for
  std::map<Rank, RankUnits> known_;
};

}  // namespace stepgraph::offload
