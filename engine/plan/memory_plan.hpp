#pragma once
#include <cstdint>
#include <ostream>
#include <string_view>
#include <vector>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"
#include "engine/graph/issue_order.hpp"
#include "engine/graph/ordered_graph.hpp"
#include "engine/simulate/machine.hpp"

namespace stepgraph {

// May the plan order nodes that the graph leaves free, so that their buffers can share bytes?
enum class Reuse : std::uint8_t {
  free,  // no: buffers share bytes only where the graph's own edges allow it. (The next run of the graph may still have
         // to wait for the last tenants of this one: a step is a loop body.)
  tight,  // yes: reuse edges are added, the arena gets smaller, the step may get slower
};
[[nodiscard]] std::string_view to_string(Reuse reuse) noexcept;

// The memory of one rank in one space: persistent buffers first, which share with nobody, then what step buffers share.
struct ArenaPlan {
  Rank rank                     = {};
  Space space                   = Space::device;
  std::int64_t size_bytes       = 0;  // what a run allocates
  std::int64_t persistent_bytes = 0;  // of those
  std::int64_t lower_bound      = 0;  // the most bytes alive at one turn of the order, persistent ones included;
                                      // sizes are rounded up to the alignment
  std::int64_t free_bytes  = 0;       // the size with Reuse::free ...
  std::int64_t tight_bytes = 0;       // ... and with Reuse::tight
};

// `after` may start only when `before` has ended: the new tenant takes bytes of the old one.
struct ReuseEdge {
  Node before       = {};
  Node after        = {};
  Buffer old_tenant = {};
  Buffer new_tenant = {};
  bool loop         = false;  // `after` is of the next run of the graph
};

// Where each buffer of a graph lies, decided before anything runs and never moved.
struct MemoryPlan {
  static constexpr std::int64_t nowhere   = -1;  // tokens, and step buffers that no node touches
  static constexpr std::int64_t alignment = 64;  // a cache line: neighbours do not share one
  [[nodiscard]] static constexpr std::int64_t aligned(std::int64_t size_bytes) noexcept {
    return (size_bytes + alignment - 1) / alignment * alignment;
  }

  Reuse reuse                       = Reuse::tight;
  std::vector<std::int64_t> offsets = {};   // by buffer, in bytes from the start of its arena
  std::vector<ArenaPlan> arenas     = {};   // by rank, then space; those that hold something
  std::vector<std::uint32_t> turns  = {};   // by node: its place in the order along which lifetimes were taken; nodes
                                            // that can only run together (parts that meet, parts issued together)
                                            // share a turn
  std::vector<ReuseEdge> reuse_edges = {};  // those that were added, and why; `edges` holds them too
  IssueOrder issue_order             = IssueOrder::any;  // the order of communications that `edges` holds
  Edges edges                        = {};  // the graph's, the issue order's and the reuse edges: what runs
  double makespan_s                  = 0;   // simulated, without the reuse edges ...
  double makespan_with_reuse_s       = 0;   // ... and with the reuse edges of `edges`
  bool on_machine = false;                  // simulated on a machine that was given; else all nodes take equally long

  [[nodiscard]] ArenaPlan arena(Rank rank, Space space = Space::device) const;  // empty when it holds nothing
  [[nodiscard]] std::int64_t num_reuse_edges() const noexcept;                  // inside one run
};

// What the plan costs, before anything runs: arenas with both sizes and the lower bound, edges added, simulated times.
std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan);

struct MemoryPlanOptions {
  Reuse reuse            = Reuse::tight;
  const Machine* machine = nullptr;  // whose simulated timeline gives the order; none: all nodes take equally long
  IssueOrder issue_order = IssueOrder::any;  // what the world needs; RunnableGraph fills it in
};

// Plans along one order: a topological order of everything that waits for anything (edges, lanes, issue positions,
// parts that meet), by simulated time. Buffers whose lifetimes do not overlap in it may share bytes. Reuse edges follow
// the order, so they close no circle; a rank's issue positions are part of it, so the same holds across processes that
// each plan their own slice. Whether nodes
// without a lane are ordered is known for up to some 16,000 nodes; beyond that `free` takes them to be unordered.
// Throws Error(graph) when the graph has no such order (`verify` prints the cycle).
[[nodiscard]] MemoryPlan plan_memory(const Graph& graph, const MemoryPlanOptions& options = {});

// What a plan of the whole graph says about one rank: a plan of `slice(graph, rank)`.
[[nodiscard]] MemoryPlan slice(const Graph& graph, const MemoryPlan& plan, Rank rank);

}  // namespace stepgraph
