#include "engine/plan/memory_plan.hpp"

#include <algorithm>
#include <array>
#include <iomanip>
#include <span>
#include <sstream>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "engine/graph/graph_data.hpp"

namespace stepgraph {
namespace {

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

}  // namespace stepgraph
