#include "engine/plan/memory_plan.hpp"

#include <algorithm>
#include <array>
#include <iomanip>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <sstream>
#include <tuple>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "engine/plan/order.hpp"
#include "engine/plan/packing.hpp"
#include "engine/plan/reuse_edges.hpp"
#include "engine/plan/tenants.hpp"
#include "engine/simulate/simulate.hpp"

namespace stepgraph {
namespace {

// A machine on which every node takes one second.
Machine even_machine(int num_ranks) {
  Machine machine(num_ranks);
  for (const NodeKind kind : {NodeKind::compute, NodeKind::communicate, NodeKind::copy, NodeKind::host})
    machine.rate(kind, {.overhead_s = 1});
  return machine;
}

bool moves_between_spaces(const Graph& graph) {
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const auto lane = graph.lane(Node{node});
    if (lane && (lane->kind == LaneKind::h2d || lane->kind == LaneKind::d2h || lane->kind == LaneKind::disk))
      return true;
  }
  return false;
}

// The machine that orders nodes where none is given. If all nodes took equally long, thousands of small transfers would
// seem to outlast the computation that they belong to.
Machine usual_machine(const Graph& graph) {
  return moves_between_spaces(graph) ? device_machine({.ranks = graph.num_ranks()}) : even_machine(graph.num_ranks());
}

class Planner {
 public:
  Planner(const Graph& graph, const MemoryPlanOptions& options)
      : graph_(graph), machine_(options.machine ? *options.machine : usual_machine(graph)) {
    plan_.reuse       = options.reuse;
    plan_.issue_order = options.issue_order;
    plan_.on_machine  = options.machine != nullptr;
    plan_.workspaces  = plan_workspaces(graph, options.workspaces);
  }

  MemoryPlan plan() {
    plan_.edges             = edges_in_issue_order(graph_, plan_.issue_order);
    const Timeline timeline = simulate({graph_, plan_.edges}, machine_);
    plan_.makespan_s        = timeline.makespan_s;
    plan_.turns             = order_nodes(graph_, timeline);
    tenants_                = find_tenants(graph_, plan_.turns);
    order_                  = std::make_unique<TenantOrder>(OrderedGraph(graph_, plan_.edges), tenants_);
    place_persistent();
    // Within an arena, tenants with the larger alignment come first.
    std::map<std::tuple<Rank, Space, std::int64_t>, std::vector<std::uint32_t>> by_region;
    std::map<std::pair<Rank, Space>, std::vector<std::uint32_t>> by_arena;
    for (std::uint32_t i = 0; i < tenants_.size(); ++i) {
      const BufferSpec& buffer = graph_.spec(Buffer{tenants_[i].buffer});
      by_region[{buffer.rank, buffer.space, -MemoryPlan::alignment_of(buffer)}].push_back(i);
      by_arena[{buffer.rank, buffer.space}].push_back(i);
    }
    for (const auto& [where, tenants] : by_arena)
      arena(where.first, where.second).lower_bound += most_at_once(items_of(tenants));
    for (const auto& [where, tenants] : by_region) place(arena(std::get<Rank>(where), std::get<Space>(where)), tenants);
    for (const auto& [where, arena] : arenas_) plan_.arenas.push_back(arena);
    order_.reset();  // looks at the edges that are changed now
    plan_.reuse_edges = add_reuse_edges(graph_, plan_.turns, tenants_, successions_, plan_.edges);
    plan_.makespan_with_reuse_s =
        plan_.num_reuse_edges() == 0 ? plan_.makespan_s : simulate({graph_, plan_.edges}, machine_).makespan_s;
    return std::move(plan_);
  }

 private:
  ArenaPlan& arena(Rank rank, Space space) {
    return arenas_.try_emplace({rank, space}, ArenaPlan{.rank = rank, .space = space}).first->second;
  }

  // Persistent buffers come first: those of whole blocks, then the others, both in the order they were created. Graphs
  // with the same persistent buffers therefore place them at the same offsets.
  void place_persistent() {
    plan_.offsets.assign(graph_.num_buffers(), MemoryPlan::nowhere);
    for (const std::int64_t alignment : {MemoryPlan::block_alignment, MemoryPlan::alignment}) {
      for (std::uint32_t i = 0; i < graph_.num_buffers(); ++i) {
        const BufferSpec& buffer = graph_.spec(Buffer{i});
        if (buffer.token || buffer.lifetime != Lifetime::persistent || MemoryPlan::alignment_of(buffer) != alignment)
          continue;
        ArenaPlan& in    = arena(buffer.rank, buffer.space);
        plan_.offsets[i] = in.persistent_bytes;
        in.persistent_bytes += MemoryPlan::room_of(buffer);
      }
    }
    // The tenants behind them begin at a multiple of their alignment.
    for (const Tenant& tenant : tenants_) {
      const BufferSpec& buffer = graph_.spec(Buffer{tenant.buffer});
      ArenaPlan& in            = arena(buffer.rank, buffer.space);
      in.persistent_bytes      = MemoryPlan::round_up(in.persistent_bytes, MemoryPlan::alignment_of(buffer));
    }
    for (auto& [where, in] : arenas_)
      in.size_bytes = in.lower_bound = in.free_bytes = in.tight_bytes = in.persistent_bytes;
  }

  // The items to place in an arena. Turns are renumbered among these items, so that ranks with the same work have
  // equal items and share one packing.
  [[nodiscard]] std::vector<PackItem> items_of(const std::vector<std::uint32_t>& tenants) const {
    std::vector<std::uint32_t> turns;
    for (const std::uint32_t i : tenants) turns.insert(turns.end(), {tenants_[i].first, tenants_[i].last});
    std::sort(turns.begin(), turns.end());
    turns.erase(std::unique(turns.begin(), turns.end()), turns.end());
    const auto count = [&](std::uint32_t turn) {
      return static_cast<std::uint32_t>(std::lower_bound(turns.begin(), turns.end(), turn) - turns.begin());
    };
    std::vector<PackItem> items;
    for (const std::uint32_t i : tenants)
      items.push_back({MemoryPlan::room_of(graph_.spec(Buffer{tenants_[i].buffer})), count(tenants_[i].first),
                       count(tenants_[i].last)});
    return items;
  }

  void place(ArenaPlan& arena, const std::vector<std::uint32_t>& tenants) {
    const std::vector<PackItem> items = items_of(tenants);
    const auto [at, is_new]           = packed_.try_emplace(items);
    Packed& packed                    = at->second;
    // The fewer distinct arenas there are, the more effort each one gets.
    const std::int64_t effort = std::max<std::int64_t>(4'000'000, 400'000'000 / (std::ssize(packed_) + 4));
    if (is_new) packed.tight = pack(items, effort);
    // Equal items may be ordered differently on another rank, so a packing found there is checked again.
    if (is_new || !is_free(tenants, items, packed.free))
      packed.free = is_free(tenants, items, packed.tight) ? packed.tight : pack_free(tenants, items, effort);
    if (packed.free.size <= packed.tight.size) packed.tight = packed.free;  // no larger, and adds no reuse edges
    const Packing& chosen    = plan_.reuse == Reuse::free ? packed.free : packed.tight;
    const std::int64_t begin = arena.size_bytes;
    arena.free_bytes += packed.free.size;
    arena.tight_bytes += packed.tight.size;
    arena.size_bytes += chosen.size;
    for (std::size_t i = 0; i < tenants.size(); ++i)
      plan_.offsets[tenants_[tenants[i]].buffer] = begin + chosen.offsets[i];
    for (const Succession& succession : find_successions(tenants_, tenants, stays(items, chosen))) {
      // No edge is needed where the graph already orders the two tenants.
      if (succession.loop || !order_->before(succession.old_tenant, succession.new_tenant))
        successions_.push_back(succession);
    }
  }

  [[nodiscard]] Packing pack_free(const std::vector<std::uint32_t>& tenants, const std::vector<PackItem>& items,
                                  std::int64_t effort) const {
    // Translates turns of the graph's order into turns of the items.
    std::vector<std::uint32_t> free_from = order_->gone_from(tenants);
    std::map<std::uint32_t, std::uint32_t> first_at;
    for (std::size_t i = 0; i < tenants.size(); ++i) first_at[tenants_[tenants[i]].first] = items[i].first;
    for (std::uint32_t& turn : free_from) {
      const auto next = first_at.lower_bound(turn);
      turn            = next == first_at.end() ? std::numeric_limits<std::uint32_t>::max() : std::max(next->second, 1u);
    }
    return pack(
        items, std::max<std::int64_t>(effort, 48'000'000),
        [&](std::uint32_t a, std::uint32_t b) { return order_->before(tenants[a], tenants[b]); }, free_from);
  }

  [[nodiscard]] static std::vector<Stay> stays(const std::vector<PackItem>& items, const Packing& packing) {
    std::vector<Stay> out;
    for (std::size_t i = 0; i < items.size(); ++i)
      out.push_back({packing.offsets[i], packing.offsets[i] + items[i].size});
    return out;
  }
  [[nodiscard]] bool is_free(const std::vector<std::uint32_t>& tenants, const std::vector<PackItem>& items,
                             const Packing& packing) const {
    const auto successions = find_successions(tenants_, tenants, stays(items, packing));
    return std::all_of(successions.begin(), successions.end(), [&](const Succession& succession) {
      return succession.loop || order_->before(succession.old_tenant, succession.new_tenant);
    });
  }

  struct Packed {
    Packing tight, free;
  };
  struct Smaller {
    bool operator()(const std::vector<PackItem>& a, const std::vector<PackItem>& b) const {
      return std::lexicographical_compare(
          a.begin(), a.end(), b.begin(), b.end(), [](const PackItem& x, const PackItem& y) {
            return std::tuple(x.size, x.first, x.last) < std::tuple(y.size, y.first, y.last);
          });
    }
  };

  const Graph& graph_;
  Machine machine_;
  MemoryPlan plan_;
  std::map<std::pair<Rank, Space>, ArenaPlan> arenas_;
  std::vector<Tenant> tenants_;
  std::unique_ptr<TenantOrder> order_;
  std::map<std::vector<PackItem>, Packed, Smaller> packed_;  // packings already found, by items
  std::vector<Succession> successions_;
};

constexpr std::size_t most_shown = 16;  // lines of a table

std::string ranks_text(Rank first, Rank last) { return last == first ? str(first) : str(first, "-", last); }

// Consecutive ranks with the same workspaces share lines. The node is that of the first of them.
void print_workspaces(std::ostream& out, const MemoryPlan& plan) {
  if (plan.workspaces.empty()) return;
  const auto of_rank = [&](std::size_t begin) {
    std::size_t end = begin;
    while (end < plan.workspaces.size() && plan.workspaces[end].rank == plan.workspaces[begin].rank) ++end;
    return std::span(plan.workspaces).subspan(begin, end - begin);
  };
  const auto alike = [](const WorkspacePlan& a, const WorkspacePlan& b) {
    return a.lane == b.lane && a.size_bytes == b.size_bytes;
  };
  out << "  ranks     workspace of" << std::setw(13) << "bytes"
      << "  for\n";
  std::size_t lines = 0, i = 0;
  for (std::size_t next; i < plan.workspaces.size() && lines < most_shown; i = next) {
    const auto first = of_rank(i);
    Rank last        = first.front().rank;
    for (next = i + first.size(); next < plan.workspaces.size();) {
      const auto other = of_rank(next);
      if (!std::equal(first.begin(), first.end(), other.begin(), other.end(), alike)) break;
      last = other.front().rank;
      next += other.size();
    }
    for (const WorkspacePlan& each : first) {
      out << "  " << std::left << std::setw(10) << ranks_text(first.front().rank, last) << std::setw(12)
          << to_string(each.lane) << std::right << std::setw(13) << bytes_text(static_cast<double>(each.size_bytes))
          << "  node " << each.node.id << "\n";
      ++lines;
    }
  }
  if (i < plan.workspaces.size()) out << "  ... and " << plan.workspaces.size() - i << " more workspaces\n";
}

}  // namespace

std::string_view to_string(Reuse reuse) noexcept { return reuse == Reuse::free ? "free" : "tight"; }

ArenaPlan MemoryPlan::arena(Rank rank, Space space) const {
  const auto at =
      std::lower_bound(arenas.begin(), arenas.end(), std::pair(rank, space),
                       [](const ArenaPlan& of, const auto& key) { return std::pair(of.rank, of.space) < key; });
  if (at != arenas.end() && at->rank == rank && at->space == space) return *at;
  return {.rank = rank, .space = space};
}

WorkspacePlan MemoryPlan::largest_workspace(Rank rank) const {
  WorkspacePlan most{.rank = rank};
  for (const WorkspacePlan& workspace : workspaces) {
    if (workspace.rank == rank && workspace.size_bytes > most.size_bytes) most = workspace;
  }
  return most;
}

std::int64_t MemoryPlan::workspace_bytes(Rank rank) const {
  std::int64_t bytes = 0;
  for (const WorkspacePlan& workspace : workspaces) bytes += workspace.rank == rank ? workspace.size_bytes : 0;
  return bytes;
}

std::int64_t MemoryPlan::device_bytes(Rank rank) const { return arena(rank).size_bytes + workspace_bytes(rank); }

std::int64_t MemoryPlan::num_reuse_edges() const noexcept {
  return std::count_if(reuse_edges.begin(), reuse_edges.end(), [](const ReuseEdge& edge) { return !edge.loop; });
}

std::ostream& operator<<(std::ostream& out, const MemoryPlan& plan) {
  const auto sizes = [](const ArenaPlan& arena) {
    return std::array{arena.size_bytes, arena.free_bytes, arena.tight_bytes, arena.lower_bound, arena.persistent_bytes};
  };
  std::ostringstream text;
  text << "memory plan, reuse " << to_string(plan.reuse) << "\n  ranks     space  " << std::right;
  for (const char* title : {"arena", "free", "tight", "lower bound", "persistent"}) text << std::setw(13) << title;
  text << "\n";
  // Consecutive ranks with equal sizes share one line.
  std::size_t lines = 0, i = 0;
  for (std::size_t next; i < plan.arenas.size() && lines < most_shown; i = next, ++lines) {
    const ArenaPlan& first = plan.arenas[i];
    for (next = i + 1; next < plan.arenas.size(); ++next) {
      if (plan.arenas[next].space != first.space || sizes(plan.arenas[next]) != sizes(first)) break;
    }
    const Rank last = plan.arenas[next - 1].rank;
    text << "  " << std::left << std::setw(10) << ranks_text(first.rank, last) << std::setw(7) << to_string(first.space)
         << std::right;
    for (const std::int64_t bytes : sizes(first)) text << std::setw(13) << bytes_text(static_cast<double>(bytes));
    text << "\n";
  }
  if (i < plan.arenas.size()) text << "  ... and " << plan.arenas.size() - i << " more arenas\n";
  print_workspaces(text, plan);
  const std::int64_t inside = plan.num_reuse_edges(), around = std::ssize(plan.reuse_edges) - inside;
  text << "  " << inside << " reuse edge" << (inside == 1 ? "" : "s") << ", and " << around << " into the next run";
  if (plan.makespan_s > 0) {
    text << std::fixed << std::setprecision(2) << "; simulated step " << std::showpos
         << 100 * (plan.makespan_with_reuse_s / plan.makespan_s - 1) << std::noshowpos << "%"
         << (plan.on_machine ? "" : " if all nodes took equally long");
  }
  return out << text.str() << "\n";
}

MemoryPlan slice(const Graph& graph, const MemoryPlan& plan, const RankSet& ranks) {
  std::vector<std::uint32_t> new_node(graph.num_nodes(), no_node), new_buffer(graph.num_buffers(), no_node), nodes;
  MemoryPlan out;
  out.reuse                 = plan.reuse;
  out.issue_order           = plan.issue_order;
  out.makespan_s            = plan.makespan_s;
  out.makespan_with_reuse_s = plan.makespan_with_reuse_s;
  out.on_machine            = plan.on_machine;
  std::uint32_t num_buffers = 0;
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    if (!ranks.contains(graph.spec(Buffer{i}).rank)) continue;
    new_buffer[i] = num_buffers++;
    out.offsets.push_back(plan.offsets[i]);
  }
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (!ranks.contains(graph.rank({i}))) continue;
    new_node[i] = static_cast<std::uint32_t>(nodes.size());
    nodes.push_back(i);
    out.turns.push_back(plan.turns[i]);
  }
  std::copy_if(plan.arenas.begin(), plan.arenas.end(), std::back_inserter(out.arenas),
               [&](const ArenaPlan& arena) { return ranks.contains(arena.rank); });
  for (WorkspacePlan workspace : plan.workspaces) {
    if (!ranks.contains(workspace.rank)) continue;
    workspace.node.id = new_node[workspace.node.id];
    out.workspaces.push_back(workspace);
  }
  for (ReuseEdge edge : plan.reuse_edges) {
    if (!ranks.contains(graph.rank(edge.before))) continue;
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

OrderedGraph::OrderedGraph(const Graph& of, const MemoryPlan& plan) : graph(of), edges(plan.edges), memory(&plan) {}

MemoryPlan plan_memory(const Graph& graph, const MemoryPlanOptions& options) { return Planner(graph, options).plan(); }

}  // namespace stepgraph
