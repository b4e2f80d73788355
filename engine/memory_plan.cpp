#include "engine/memory_plan.hpp"

#include <algorithm>
#include <iomanip>
#include <map>
#include <memory>
#include <sstream>
#include <utility>

#include "engine/error.hpp"
#include "engine/packing.hpp"
#include "engine/plan_edges.hpp"
#include "engine/plan_order.hpp"
#include "engine/simulate.hpp"
#include "engine/tenants.hpp"
#include "engine/text.hpp"

namespace stepgraph {
namespace {

std::int64_t aligned(std::int64_t size) {
  return (size + MemoryPlan::alignment - 1) / MemoryPlan::alignment * MemoryPlan::alignment;
}

// Every node takes one second.
Machine even_machine(int num_ranks) {
  Machine machine(num_ranks);
  for (const NodeKind kind : {NodeKind::compute, NodeKind::communicate, NodeKind::copy, NodeKind::host})
    machine.rate(kind, {.overhead_s = 1});
  return machine;
}

class Planner {
 public:
  Planner(const Graph& graph, const MemoryPlanOptions& options)
      : graph_(graph), machine_(options.machine ? *options.machine : even_machine(graph.num_ranks())) {
    plan_.reuse = options.reuse;
  }

  MemoryPlan plan() {
    const Timeline timeline = simulate(graph_, machine_);
    plan_.makespan_s        = timeline.makespan_s;
    plan_.position          = order_nodes(graph_, timeline);
    tenants_                = find_tenants(graph_, plan_.position);
    order_                  = std::make_unique<TenantOrder>(graph_, tenants_);
    place_persistent();
    std::map<std::pair<int, Space>, std::vector<std::uint32_t>> by_arena;
    for (std::uint32_t i = 0; i < tenants_.size(); ++i) {
      const BufferSpec& buffer = graph_.spec(Buffer{tenants_[i].buffer});
      by_arena[{index(buffer.rank), buffer.space}].push_back(i);
    }
    for (const auto& [where, tenants] : by_arena) place(arena(Rank{where.first}, where.second), tenants);
    std::sort(plan_.arenas.begin(), plan_.arenas.end(), [](const ArenaPlan& a, const ArenaPlan& b) {
      return std::pair(a.rank, a.space) < std::pair(b.rank, b.space);
    });
    plan_.reuse_edges = add_reuse_edges(graph_, plan_.position, tenants_, successions_, plan_.edges);
    plan_.makespan_with_reuse_s =
        plan_.num_reuse_edges() == 0 ? plan_.makespan_s : simulate(graph_, plan_.edges, machine_).makespan_s;
    return std::move(plan_);
  }

 private:
  ArenaPlan& arena(Rank rank, Space space) {
    for (ArenaPlan& arena : plan_.arenas) {
      if (arena.rank == rank && arena.space == space) return arena;
    }
    plan_.arenas.push_back({.rank = rank, .space = space});
    return plan_.arenas.back();
  }

  // First, and one after another as they were made: graphs with the same persistent buffers agree on where they are.
  void place_persistent() {
    plan_.offsets.assign(graph_.num_buffers(), MemoryPlan::nowhere);
    for (std::uint32_t i = 0; i < graph_.num_buffers(); ++i) {
      const BufferSpec& buffer = graph_.spec(Buffer{i});
      if (buffer.token || buffer.lifetime != Lifetime::persistent) continue;
      ArenaPlan& in    = arena(buffer.rank, buffer.space);
      plan_.offsets[i] = in.persistent_bytes;
      in.persistent_bytes += aligned(buffer.size_bytes);
    }
    for (ArenaPlan& in : plan_.arenas)
      in.size_bytes = in.lower_bound = in.free_bytes = in.tight_bytes = in.persistent_bytes;
  }

  void place(ArenaPlan& arena, const std::vector<std::uint32_t>& tenants) {
    std::vector<PackItem> items;
    for (const std::uint32_t i : tenants) {
      items.push_back(
          {aligned(graph_.spec(Buffer{tenants_[i].buffer}).size_bytes), tenants_[i].first, tenants_[i].last});
    }
    const std::int64_t effort = std::max<std::int64_t>(1'000'000, 100'000'000 / (std::ssize(plan_.arenas) + 4));
    const auto may_share = [&](std::uint32_t a, std::uint32_t b) { return order_->before(tenants[a], tenants[b]); };
    const Packing free   = pack(items, effort, may_share);
    Packing tight        = pack(items, effort);
    if (free.size <= tight.size) tight = free;  // as small, and nothing has to wait
    const Packing& chosen = plan_.reuse == Reuse::free ? free : tight;
    arena.lower_bound += most_at_once(items);
    arena.free_bytes += free.size;
    arena.tight_bytes += tight.size;
    arena.size_bytes += chosen.size;

    std::vector<std::int64_t> sizes(graph_.num_buffers(), 0);
    for (std::size_t i = 0; i < tenants.size(); ++i) {
      const std::uint32_t buffer = tenants_[tenants[i]].buffer;
      plan_.offsets[buffer]      = arena.persistent_bytes + chosen.offsets[i];
      sizes[buffer]              = items[i].size;
    }
    for (const Succession& succession : find_successions(tenants_, tenants, plan_.offsets, sizes)) {
      // Where the graph orders them already, there is nothing to add.
      if (succession.loop || !order_->before(succession.old_tenant, succession.new_tenant))
        successions_.push_back(succession);
    }
  }

  const Graph& graph_;
  Machine machine_;
  MemoryPlan plan_;
  std::vector<Tenant> tenants_;
  std::unique_ptr<TenantOrder> order_;
  std::vector<Succession> successions_;
};

}  // namespace

std::string_view to_string(Reuse reuse) noexcept { return reuse == Reuse::free ? "free" : "tight"; }

ArenaPlan MemoryPlan::arena(Rank rank, Space space) const {
  for (const ArenaPlan& arena : arenas) {
    if (arena.rank == rank && arena.space == space) return arena;
  }
  return {.rank = rank, .space = space};
}

std::int64_t MemoryPlan::num_reuse_edges() const noexcept {
  return std::count_if(reuse_edges.begin(), reuse_edges.end(), [](const ReuseEdge& edge) { return !edge.loop; });
}

std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan) {
  constexpr std::size_t most_shown = 16;
  std::ostringstream text;
  text << "memory plan, reuse " << to_string(plan.reuse) << "\n";
  text << "  rank  space     arena        free         tight        lower bound  persistent\n";
  for (std::size_t i = 0; i < plan.arenas.size() && i < most_shown; ++i) {
    const ArenaPlan& arena = plan.arenas[i];
    text << "  " << std::left << std::setw(6) << arena.rank << std::setw(10) << to_string(arena.space);
    for (const std::int64_t bytes :
         {arena.size_bytes, arena.free_bytes, arena.tight_bytes, arena.lower_bound, arena.persistent_bytes})
      text << std::setw(13) << bytes_text(static_cast<double>(bytes));
    text << "\n";
  }
  if (plan.arenas.size() > most_shown) text << "  ... and " << plan.arenas.size() - most_shown << " more\n";
  const std::int64_t inside = plan.num_reuse_edges();
  text << "  " << inside << " reuse edges, and " << std::ssize(plan.reuse_edges) - inside << " into the next run";
  if (plan.makespan_s > 0) {
    text << std::fixed << std::setprecision(2) << "; simulated step " << std::showpos
         << 100 * (plan.makespan_with_reuse_s / plan.makespan_s - 1) << std::noshowpos << "%";
  }
  return out << text.str() << "\n";
}

MemoryPlan slice(const Graph& graph, const MemoryPlan& plan, Rank rank) {
  std::vector<std::uint32_t> new_node(graph.num_nodes(), no_node), new_buffer(graph.num_buffers(), no_node), nodes;
  MemoryPlan out;
  out.reuse                 = plan.reuse;
  out.makespan_s            = plan.makespan_s;
  out.makespan_with_reuse_s = plan.makespan_with_reuse_s;
  std::uint32_t num_buffers = 0;
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    if (graph.spec(Buffer{i}).rank != rank) continue;
    new_buffer[i] = num_buffers++;
    out.offsets.push_back(plan.offsets[i]);
  }
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (graph.rank({i}) != rank) continue;
    new_node[i] = static_cast<std::uint32_t>(nodes.size());
    nodes.push_back(i);
    out.position.push_back(plan.position[i]);
  }
  std::copy_if(plan.arenas.begin(), plan.arenas.end(), std::back_inserter(out.arenas),
               [&](const ArenaPlan& arena) { return arena.rank == rank; });
  for (ReuseEdge edge : plan.reuse_edges) {
    if (graph.rank(edge.before) != rank) continue;
    edge.before.id     = new_node[edge.before.id];
    edge.after.id      = new_node[edge.after.id];
    edge.old_tenant.id = new_buffer[edge.old_tenant.id];
    edge.new_tenant.id = new_buffer[edge.new_tenant.id];
    out.reuse_edges.push_back(edge);
  }
  out.edges.pred_begin.push_back(0);
  out.edges.loop_begin.push_back(0);
  for (const std::uint32_t node : nodes) {
    for (const std::uint32_t before : plan.edges.before({node})) out.edges.preds.push_back(new_node[before]);
    for (const std::uint32_t before : plan.edges.before_loop({node})) out.edges.loop_preds.push_back(new_node[before]);
    out.edges.pred_begin.push_back(static_cast<std::uint32_t>(out.edges.preds.size()));
    out.edges.loop_begin.push_back(static_cast<std::uint32_t>(out.edges.loop_preds.size()));
    if (!plan.edges.clocks.empty()) out.edges.clocks.push_back(plan.edges.clocks[node]);
  }
  return out;
}

MemoryPlan plan_memory(const Graph& graph, const MemoryPlanOptions& options) { return Planner(graph, options).plan(); }

}  // namespace stepgraph
