#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "engine/plan/memory_plan.hpp"
#include "engine/plan/order.hpp"
#include "engine/plan/packing.hpp"
#include "engine/plan/planned_sizes.hpp"
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
  if (!moves_between_spaces(graph)) return even_machine(graph.num_ranks());
  return device_machine({.ranks = graph.num_ranks(), .only = graph.ranks()});
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
    const auto by_region = regions();
    std::map<std::pair<Rank, Space>, std::vector<std::uint32_t>> by_arena;
    for (std::uint32_t i = 0; i < tenants_.size(); ++i) {
      const BufferSpec& buffer = graph_.spec(Buffer{tenants_[i].buffer});
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

  // The same sizes. Arenas of other spaces are packed only if one of `only` has equal items.
  PlannedSizes sizes(std::optional<Space> only) {
    const auto by_region = regions();
    std::vector<std::vector<PackItem>> items;
    std::set<std::vector<PackItem>, Smaller> wanted;
    for (const auto& [where, tenants] : by_region) {
      items.push_back(items_of(tenants));
      if (!only || std::get<Space>(where) == *only) wanted.insert(items.back());
    }
    auto of = items.begin();
    for (const auto& [where, tenants] : by_region) {
      const auto [packed, effort, is_new] = find(*of);
      if (wanted.contains(*of)) {
        if (is_new) packed.tight = pack(*of, effort);
        // Without reuse edges an arena is not smaller than the bound.
        if (plan_.reuse == Reuse::free || packed.tight.size > most_at_once(*of))
          pack_free(packed, is_new, tenants, *of, effort);
        arena(std::get<Rank>(where), std::get<Space>(where)).size_bytes += chosen(packed).size;
      }
      ++of;
    }
    PlannedSizes out{.arenas = {}, .workspaces = std::move(plan_.workspaces)};
    for (const auto& [where, arena] : arenas_) {
      if (!only || arena.space == *only) out.arenas[where] = arena.size_bytes;
    }
    return out;
  }

 private:
  // Tenants by arena. Within an arena, those with the larger alignment come first.
  using Regions = std::map<std::tuple<Rank, Space, std::int64_t>, std::vector<std::uint32_t>>;

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

  // Finds the order, the tenants and the place of persistent buffers.
  Regions regions() {
    plan_.edges             = edges_in_issue_order(graph_, plan_.issue_order);
    const Timeline timeline = simulate({graph_, plan_.edges}, machine_);
    plan_.makespan_s        = timeline.makespan_s;
    plan_.turns             = order_nodes(graph_, timeline);
    tenants_                = find_tenants(graph_, plan_.turns);
    place_persistent();
    Regions out;
    for (std::uint32_t i = 0; i < tenants_.size(); ++i) {
      const BufferSpec& buffer = graph_.spec(Buffer{tenants_[i].buffer});
      out[{buffer.rank, buffer.space, -MemoryPlan::alignment_of(buffer)}].push_back(i);
    }
    return out;
  }

  [[nodiscard]] const TenantOrder& order() {
    if (!order_) order_ = std::make_unique<TenantOrder>(OrderedGraph(graph_, plan_.edges), tenants_);
    return *order_;
  }

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

  struct Found {
    Packed& packed;
    std::int64_t effort;
    bool is_new;
  };
  Found find(const std::vector<PackItem>& items) {
    const auto [at, is_new] = packed_.try_emplace(items);
    // The fewer distinct arenas there are, the more effort each one gets.
    return {at->second, std::max<std::int64_t>(4'000'000, 400'000'000 / (std::ssize(packed_) + 4)), is_new};
  }
  [[nodiscard]] const Packing& chosen(const Packed& packed) const {
    return plan_.reuse == Reuse::free ? packed.free : packed.tight;
  }

  void place(ArenaPlan& arena, const std::vector<std::uint32_t>& tenants) {
    const std::vector<PackItem> items   = items_of(tenants);
    const auto [packed, effort, is_new] = find(items);
    if (is_new) packed.tight = pack(items, effort);
    pack_free(packed, is_new, tenants, items, effort);
    const Packing& used      = chosen(packed);
    const std::int64_t begin = arena.size_bytes;
    arena.free_bytes += packed.free.size;
    arena.tight_bytes += packed.tight.size;
    arena.size_bytes += used.size;
    for (std::size_t i = 0; i < tenants.size(); ++i)
      plan_.offsets[tenants_[tenants[i]].buffer] = begin + used.offsets[i];
    for (const Succession& succession : find_successions(tenants_, tenants, stays(items, used))) {
      // No edge is needed where the graph already orders the two tenants.
      if (succession.loop || !order().before(succession.old_tenant, succession.new_tenant))
        successions_.push_back(succession);
    }
  }

  // Equal items may be ordered differently on another rank, so a packing found there is checked again.
  void pack_free(Packed& packed, bool is_new, const std::vector<std::uint32_t>& tenants,
                 const std::vector<PackItem>& items, std::int64_t effort) {
    if (is_new || !is_free(tenants, items, packed.free))
      packed.free = is_free(tenants, items, packed.tight) ? packed.tight : packed_free(tenants, items, effort);
    if (packed.free.size <= packed.tight.size) packed.tight = packed.free;  // no larger, and adds no reuse edges
  }

  [[nodiscard]] Packing packed_free(const std::vector<std::uint32_t>& tenants, const std::vector<PackItem>& items,
                                    std::int64_t effort) {
    const TenantOrder& of_tenants = order();
    // Translates turns of the graph's order into turns of the items.
    std::vector<std::uint32_t> free_from = of_tenants.gone_from(tenants);
    std::map<std::uint32_t, std::uint32_t> first_at;
    for (std::size_t i = 0; i < tenants.size(); ++i) first_at[tenants_[tenants[i]].first] = items[i].first;
    for (std::uint32_t& turn : free_from) {
      const auto next = first_at.lower_bound(turn);
      turn            = next == first_at.end() ? std::numeric_limits<std::uint32_t>::max() : std::max(next->second, 1u);
    }
    return pack(
        items, std::max<std::int64_t>(effort, 48'000'000),
        [&](std::uint32_t a, std::uint32_t b) { return of_tenants.before(tenants[a], tenants[b]); }, free_from);
  }

  [[nodiscard]] static std::vector<Stay> stays(const std::vector<PackItem>& items, const Packing& packing) {
    std::vector<Stay> out;
    for (std::size_t i = 0; i < items.size(); ++i)
      out.push_back({packing.offsets[i], packing.offsets[i] + items[i].size});
    return out;
  }
  [[nodiscard]] bool is_free(const std::vector<std::uint32_t>& tenants, const std::vector<PackItem>& items,
                             const Packing& packing) {
    const TenantOrder& of_tenants = order();
    const auto successions        = find_successions(tenants_, tenants, stays(items, packing));
    return std::all_of(successions.begin(), successions.end(), [&](const Succession& succession) {
      return succession.loop || of_tenants.before(succession.old_tenant, succession.new_tenant);
    });
  }

  const Graph& graph_;
  Machine machine_;
  MemoryPlan plan_;
  std::map<std::pair<Rank, Space>, ArenaPlan> arenas_;
  std::vector<Tenant> tenants_;
  std::unique_ptr<TenantOrder> order_;
  std::map<std::vector<PackItem>, Packed, Smaller> packed_;  // packings already found, by items
  std::vector<Succession> successions_;
};

}  // namespace

MemoryPlan plan_memory(const Graph& graph, const MemoryPlanOptions& options) { return Planner(graph, options).plan(); }

std::int64_t PlannedSizes::arena(Rank rank, Space space) const {
  const auto found = arenas.find({rank, space});
  return found == arenas.end() ? 0 : found->second;
}

std::int64_t PlannedSizes::device_bytes(Rank rank) const {
  std::int64_t bytes = arena(rank, Space::device);
  for (const WorkspacePlan& workspace : workspaces) bytes += workspace.rank == rank ? workspace.size_bytes : 0;
  return bytes;
}

PlannedSizes planned_sizes(const Graph& graph, const MemoryPlanOptions& options, std::optional<Space> only) {
  return Planner(graph, options).sizes(only);
}

}  // namespace stepgraph
