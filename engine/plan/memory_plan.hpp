#pragma once
#include <cstdint>
#include <ostream>
#include <string_view>
#include <vector>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph.hpp"
#include "engine/graph/issue_order.hpp"
#include "engine/graph/ordered_graph.hpp"
#include "engine/plan/workspaces.hpp"
#include "engine/simulate/machine.hpp"

namespace stepgraph {

// May the plan order nodes that the graph leaves free, so that their buffers can share bytes?
enum class Reuse : std::uint8_t {
  free,   // no: buffers share bytes only where the graph's own edges allow it. (The next run of the graph may still
          // have to wait for the last tenants of this one: a step is a loop body.)
  tight,  // yes: reuse edges are added, the arena gets smaller, the step can get slower
};
[[nodiscard]] std::string_view to_string(Reuse reuse) noexcept;

// The memory of one rank in one space: first persistent buffers, which share no bytes, then the bytes that step buffers
// share. In pinned memory, buffers of whole blocks and smaller ones lie apart, and share no bytes.
struct ArenaPlan {
  Rank rank                     = {};
  Space space                   = Space::device;
  std::int64_t size_bytes       = 0;  // the bytes that a run allocates
  std::int64_t persistent_bytes = 0;  // of those
  std::int64_t lower_bound      = 0;  // the most bytes alive at one turn of the order, persistent ones included;
                                      // sizes are rounded up to the alignment
  std::int64_t free_bytes  = 0;       // the size with Reuse::free ...
  std::int64_t tight_bytes = 0;       // ... and with Reuse::tight
};

// `after` may start only when `before` has ended, because the new tenant uses bytes of the old one.
struct ReuseEdge {
  Node before       = {};
  Node after        = {};
  Buffer old_tenant = {};
  Buffer new_tenant = {};
  bool loop         = false;  // `after` is of the next run of the graph
};

// The place of each buffer of a graph, decided before the graph runs. Buffers never move.
struct MemoryPlan {
  static constexpr std::int64_t nowhere   = -1;  // tokens, and step buffers that no node uses
  static constexpr std::int64_t alignment = 64;  // a cache line: neighbours do not share one
  [[nodiscard]] static constexpr std::int64_t aligned(std::int64_t size_bytes) noexcept {
    return round_up(size_bytes, alignment);
  }
  // Of buffers on disk, and of pinned buffers of at least this size: the disk transfers whole blocks.
  static constexpr std::int64_t block_alignment = 4096;  // Storage::block_bytes
  [[nodiscard]] static std::int64_t alignment_of(const BufferSpec& buffer) noexcept {
    const bool in_blocks =
        buffer.space == Space::disk || (buffer.space == Space::pinned && buffer.size_bytes >= block_alignment);
    return in_blocks ? block_alignment : alignment;
  }
  // The largest alignment of buffers in an arena, and that of the arena.
  [[nodiscard]] static constexpr std::int64_t alignment_of(Space space) noexcept {
    return space == Space::device ? alignment : block_alignment;
  }
  // The size of a buffer, rounded up to its alignment: its bytes in an arena.
  [[nodiscard]] static std::int64_t room_of(const BufferSpec& buffer) noexcept {
    return round_up(buffer.size_bytes, alignment_of(buffer));
  }
  [[nodiscard]] static constexpr std::int64_t round_up(std::int64_t size_bytes, std::int64_t to) noexcept {
    return (size_bytes + to - 1) / to * to;
  }

  Reuse reuse                           = Reuse::tight;
  std::vector<std::int64_t> offsets     = {};  // by buffer, in bytes from the start of its arena
  std::vector<ArenaPlan> arenas         = {};  // by rank, then space; without empty ones
  std::vector<WorkspacePlan> workspaces = {};  // of devices, beside the arenas: by rank, then lane; without empty ones
  std::vector<std::uint32_t> turns = {};    // by node: its place in the order along which lifetimes were taken; nodes
                                            // that can only run together (parts that meet, parts issued together)
                                            // share a turn
  std::vector<ReuseEdge> reuse_edges = {};  // the added edges and their reasons; `edges` includes them
  IssueOrder issue_order             = IssueOrder::any;  // the order of communications that `edges` holds
  Edges edges                        = {};     // the graph's, the issue order's and the reuse edges: what runs
  double makespan_s                  = 0;      // simulated, without the reuse edges ...
  double makespan_with_reuse_s       = 0;      // ... and with the reuse edges of `edges`
  bool on_machine                    = false;  // simulated on a given machine; else on the default one

  [[nodiscard]] ArenaPlan arena(Rank rank, Space space = Space::device) const;  // size 0: no buffers
  // The largest of a rank's workspaces; size 0: it has none. All of them together. And all device memory of the rank:
  // its arena and its workspaces.
  [[nodiscard]] WorkspacePlan largest_workspace(Rank rank) const;
  [[nodiscard]] std::int64_t workspace_bytes(Rank rank) const;
  [[nodiscard]] std::int64_t device_bytes(Rank rank) const;
  [[nodiscard]] std::int64_t num_reuse_edges() const noexcept;  // inside one run
};

// A table of the plan: arenas with both sizes and the lower bound, workspaces, the number of edges added, simulated
// times.
std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan);

struct MemoryPlanOptions {
  Reuse reuse = Reuse::tight;
  // Its simulated timeline gives the order. Null: all nodes take equally long; in a graph with transfers between
  // device, host and disk, as long as on device_machine.
  const Machine* machine    = nullptr;
  IssueOrder issue_order    = IssueOrder::any;  // that the world needs; RunnableGraph sets it
  WorkspaceNeeds workspaces = {};               // likewise
};

// Plans along one order: a topological order of all waits (edges, lanes, issue positions, parts that meet), sorted by
// simulated time. Buffers whose lifetimes do not overlap in that order may share bytes. Reuse edges follow the order,
// so they form no cycle. The order includes the issue positions of each rank, so there is no cycle either when
// processes plan their own slices. The order between nodes without a lane is known for up to about 16,000 nodes; with
// more, `free` treats them as unordered. Throws Error(graph) when the graph has no such order (`verify` prints the
// cycle).
[[nodiscard]] MemoryPlan plan_memory(const Graph& graph, const MemoryPlanOptions& options = {});

// The part of a plan that concerns some ranks: a plan of `slice(graph, ranks)`.
[[nodiscard]] MemoryPlan slice(const Graph& graph, const MemoryPlan& plan, const RankSet& ranks);

}  // namespace stepgraph
