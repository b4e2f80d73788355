#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/graph/ordered_graph.hpp"

// Which buffers are alive when, and which nodes access them. For the planner; internal to engine/.
namespace stepgraph {

// A step buffer that at least one node accesses: its lifetime, and its first and last nodes.
struct Tenant {
  std::uint32_t buffer;
  std::uint32_t first, last;            // turns of the order, both included
  std::vector<std::uint32_t> move_in;   // the first node on each lane that accesses it, and all nodes without a lane
  std::vector<std::uint32_t> move_out;  // the last node on each lane, and all nodes without a lane
};

// The tenants of a graph, sorted by buffer. Tokens, persistent buffers and buffers of which no byte is accessed are
// left out. `turns` is MemoryPlan::turns.
[[nodiscard]] std::vector<Tenant> find_tenants(const Graph& graph, const std::vector<std::uint32_t>& turns);

// The order of tenants by the edges of `graph`, which has no reuse edges yet. A tenant is before another if every node
// that accesses the first runs before every node that accesses the second. Two tenants may count as unordered although
// they are not: what follows a node without a lane is taken from the derived edges, and is unknown if there are too
// many such nodes.
class TenantOrder {
 public:
  TenantOrder(const OrderedGraph& graph, const std::vector<Tenant>& tenants);
  [[nodiscard]] bool before(std::uint32_t a, std::uint32_t b) const;  // indices of tenants

  // For each of the given tenants, which share an arena: a turn such that the tenant is before each given tenant whose
  // lifetime begins at that turn or later. The largest number if no such turn is known. Near-linear in the number of
  // tenants; calling before() for each pair would be quadratic.
  [[nodiscard]] std::vector<std::uint32_t> gone_from(const std::vector<std::uint32_t>& of_arena) const;

 private:
  struct Row {
    LaneClock needs;            // how far each lane must have progressed before the tenant is gone
    LaneClock seen;             // how far each lane has progressed when the tenant moves in
    bool has_laneless = false;  // a node without a lane is among the last to access it
  };
  [[nodiscard]] bool ancestor(std::uint32_t a, std::uint32_t b) const;

  const GraphData& data_;
  const Edges& edges_;
  const std::vector<Tenant>& tenants_;
  std::vector<Row> rows_;
  // Nodes without a lane have no clock. One bit per pair stores their order, unless there are too many.
  std::vector<std::uint32_t> laneless_index_;  // by node
  std::size_t words_ = 0;                      // per node; 0: not stored, nodes without a lane count as unordered
  std::vector<std::uint64_t> ancestors_;
};

// Two tenants that use the same bytes, one directly after the other.
struct Succession {
  std::uint32_t old_tenant, new_tenant;  // indices
  bool loop;                             // the new tenant belongs to the next run
};

// The bytes of a tenant in its arena.
struct Stay {
  std::int64_t begin, end;
};

// Finds direct successions. `stays[i]` belongs to tenant `of_arena[i]`.
[[nodiscard]] std::vector<Succession> find_successions(const std::vector<Tenant>& tenants,
                                                       const std::vector<std::uint32_t>& of_arena,
                                                       const std::vector<Stay>& stays);

}  // namespace stepgraph
