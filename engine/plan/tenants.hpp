#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "engine/graph/edges.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/graph/ordered_graph.hpp"

// Who lives where and when, for the planner: internal to engine/.
namespace stepgraph {

// A step buffer that some node touches: from when to when, and by whom.
struct Tenant {
  std::uint32_t buffer;
  std::uint32_t first, last;            // positions of the order, both included
  std::vector<std::uint32_t> move_in;   // the first node on each lane that touches it, and those without a lane
  std::vector<std::uint32_t> move_out;  // the last node on each lane, and those without a lane
};

// Those of the graph, by buffer. Tokens, persistent buffers, and buffers without a byte that a node touches are none.
[[nodiscard]] std::vector<Tenant> find_tenants(const Graph& graph, const std::vector<std::uint32_t>& position);

// Whether the edges put everything that touches one tenant before everything that touches another.
class TenantOrder {
 public:
  TenantOrder(const OrderedGraph& graph, const std::vector<Tenant>& tenants);
  [[nodiscard]] bool before(std::uint32_t a, std::uint32_t b) const;  // indices of tenants

  // For each of some tenants of one arena the position from which on all others that move in come after it; never: the
  // largest number. Near-linear, where asking about every pair is not.
  [[nodiscard]] std::vector<std::uint32_t> gone_from(const std::vector<std::uint32_t>& of_arena) const;

 private:
  struct Row {
    LaneClock needs;  // how far each lane must have come for the tenant to be gone
    LaneClock seen;   // how far each lane has come when the tenant moves in
  };
  [[nodiscard]] bool ancestor(std::uint32_t a, std::uint32_t b) const;

  const GraphData& data_;
  const Edges& edges_;
  const std::vector<Tenant>& tenants_;
  std::vector<Row> rows_;
  // Laneless nodes have no clock: a bit per pair says who comes before whom, as long as there are not too many.
  std::vector<std::uint32_t> laneless_index_;  // by node
  std::size_t words_ = 0;                      // per node; 0: nobody knows, so they are taken to be unordered
  std::vector<std::uint64_t> ancestors_;
};

// One tenant after another on the same bytes.
struct Succession {
  std::uint32_t old_tenant, new_tenant;  // indices
  bool loop;                             // the new one is of the next run
};

// Where a tenant lies in its arena.
struct Stay {
  std::int64_t begin, end;
};

// Who follows whom directly; `stays` are those of the tenants `of_arena`.
[[nodiscard]] std::vector<Succession> find_successions(const std::vector<Tenant>& tenants,
                                                       const std::vector<std::uint32_t>& of_arena,
                                                       const std::vector<Stay>& stays);

}  // namespace stepgraph
