#pragma once
#include <string>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"

namespace stepgraph::testing {

// What some execution of a graph does wrong. Each flag stands for "there is an execution in which".
struct Harm {
  bool race           = false;  // conflicting accesses of one run happen in another order than the program's
  bool broken_lane    = false;  // two nodes of a lane run in another order than the lane's
  bool loop_race      = false;  // a conflicting access of the next run happens first
  bool loop_lane      = false;  // a node of the next run overtakes one of its lane
  bool unwritten_read = false;  // step memory is read that nothing wrote in this run
  bool mismatched     = false;  // parts that the network pairs do not fit together
  bool unmatched      = false;  // a part waits for one that nobody issues
  bool bad_overlap    = false;  // a part writes what it reads where its operation does not leave it, or a byte twice
  bool deadlock       = false;  // nothing can start, and not everything is done

  [[nodiscard]] bool any() const noexcept {
    return race || broken_lane || loop_race || loop_lane || unwritten_read || mismatched || unmatched || bad_overlap ||
           deadlock;
  }
  friend bool operator==(const Harm&, const Harm&) = default;
};
[[nodiscard]] std::string to_string(const Harm& harm);  // "race + deadlock", or "none"

// The truth about small graphs, by brute force: walks every set of finished nodes that some execution passes through
// (each linear extension is a path through those sets), byte by byte, for the graph followed by itself. Knows no
// paths, clocks or intervals, and shares nothing with `derive` and `find_flaws`. Edges must stay inside a rank.
// Deadlock is looked for only among parts that match. Throws Error(config) beyond 12 nodes on a rank or 24 in all.
[[nodiscard]] Harm find_harm(const Graph& graph, const Edges& edges);

// The same question asked of values instead of order: runs every linear extension of each rank on symbolic bytes, where
// a node writes a function of itself and of all it reads. True when some execution feeds a node, or ends, with values
// that the program's order does not give. Weaker than `race || loop_race`: two values nobody reads may be swapped.
// For up to about four nodes on a rank.
[[nodiscard]] bool changes_values(const Graph& graph, const Edges& edges);

}  // namespace stepgraph::testing
