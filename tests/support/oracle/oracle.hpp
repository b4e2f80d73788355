#pragma once
#include <string>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"

namespace stepgraph::testing {

// The flaws of a graph. Each flag means that there is an execution in which this happens.
struct Harm {
  bool race           = false;  // conflicting accesses of one run happen in another order than in the program
  bool broken_lane    = false;  // two nodes of a lane run in another order than the lane's
  bool loop_race      = false;  // a conflicting access of the next run happens first
  bool loop_lane      = false;  // a node of the next run overtakes one of its lane
  bool unwritten_read = false;  // step memory is read that no node wrote in this run
  bool mismatched     = false;  // parts that the network pairs do not match
  bool unmatched      = false;  // a part waits for one that no rank issues
  bool bad_overlap    = false;  // a part overwrites input that its operation may not overwrite, or writes a byte twice
  bool deadlock       = false;  // no node can start, but some are not done

  [[nodiscard]] bool any() const noexcept {
    return race || broken_lane || loop_race || loop_lane || unwritten_read || mismatched || unmatched || bad_overlap ||
           deadlock;
  }
  friend bool operator==(const Harm&, const Harm&) = default;
};
[[nodiscard]] std::string to_string(const Harm& harm);  // "race + deadlock", or "none"

// The ground truth for small graphs, by brute force: visits every set of finished nodes that some execution passes
// through (each linear extension is a path through these sets), byte by byte, for two consecutive runs. Uses no paths,
// clocks or intervals, and shares no code with `derive` and `find_flaws`. Edges must stay inside a rank. Looks for
// deadlocks only if all parts match. Throws Error(config) beyond 12 nodes on a rank or 24 in total.
[[nodiscard]] Harm find_harm(const Graph& graph, const Edges& edges);

// The same question about values instead of order: runs every linear extension of each rank on symbolic bytes, where a
// node writes a function of itself and of everything it reads. True if in some execution a node gets an input, or the
// memory ends with values, that program order does not give. Weaker than `race || loop_race`: values that no node reads
// may be swapped. For up to about four nodes on a rank.
[[nodiscard]] bool changes_values(const Graph& graph, const Edges& edges);

}  // namespace stepgraph::testing
