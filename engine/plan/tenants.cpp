#include "engine/plan/tenants.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

namespace stepgraph {
namespace {

// Keeps one node per lane, the first or the last, and all nodes without a lane. Sorted by node.
void keep_one_per_lane(const GraphData& data, std::vector<std::uint32_t>& nodes, bool last) {
  std::array<std::uint32_t, num_lane_kinds> chosen;
  chosen.fill(no_node);
  std::vector<std::uint32_t> kept;
  for (const std::uint32_t node : nodes) {
    const std::int32_t lane = data.nodes[node].lane;
    if (lane < 0) {
      kept.push_back(node);
      continue;
    }
    std::uint32_t& best = chosen[static_cast<std::size_t>(lane)];
    const auto place    = [&](std::uint32_t of) { return data.nodes[of].lane_position; };
    if (best == no_node || (last ? place(node) > place(best) : place(node) < place(best))) best = node;
  }
  for (const std::uint32_t node : chosen) {
    if (node != no_node) kept.push_back(node);
  }
  std::sort(kept.begin(), kept.end());
  nodes = std::move(kept);
}

}  // namespace

std::vector<Tenant> find_tenants(const Graph& graph, const std::vector<std::uint32_t>& turns) {
  const GraphData& data = graph.data();
  std::vector<std::uint32_t> tenant_of(data.buffers.size(), no_node);
  std::vector<Tenant> tenants;
  for (std::uint32_t node = 0; node < data.nodes.size(); ++node) {
    for (std::uint32_t i = data.nodes[node].access_begin; i < data.access_end(node); ++i) {
      const AccessRecord& access = data.accesses[i];
      const BufferSpec& buffer   = data.buffers[access.buffer()];
      if (buffer.token || buffer.lifetime == Lifetime::persistent || data.region(access).length == 0) continue;
      std::uint32_t& id = tenant_of[access.buffer()];
      if (id == no_node) {
        id = static_cast<std::uint32_t>(tenants.size());
        tenants.push_back({access.buffer(), turns[node], turns[node], {}, {}});
      }
      Tenant& tenant = tenants[id];
      tenant.first   = std::min(tenant.first, turns[node]);
      tenant.last    = std::max(tenant.last, turns[node]);
      if (tenant.move_in.empty() || tenant.move_in.back() != node) tenant.move_in.push_back(node);
    }
  }
  for (Tenant& tenant : tenants) {
    tenant.move_out = tenant.move_in;
    keep_one_per_lane(data, tenant.move_in, /*last=*/false);
    keep_one_per_lane(data, tenant.move_out, /*last=*/true);
  }
  std::sort(tenants.begin(), tenants.end(), [](const Tenant& a, const Tenant& b) { return a.buffer < b.buffer; });
  return tenants;
}

TenantOrder::TenantOrder(const OrderedGraph& graph, const std::vector<Tenant>& tenants)
    : data_(graph.graph.data()), edges_(graph.edges), tenants_(tenants) {
  constexpr std::size_t most_words = 4u << 20;  // 32 MiB of bits
  std::uint32_t num_laneless       = 0;
  laneless_index_.assign(data_.nodes.size(), no_node);
  for (std::uint32_t node = 0; node < data_.nodes.size(); ++node) {
    if (data_.nodes[node].lane < 0) laneless_index_[node] = num_laneless++;
  }
  const std::size_t words = (num_laneless + 63) / 64;
  if (words * data_.nodes.size() <= most_words) {
    words_ = words;
    ancestors_.assign(words * data_.nodes.size(), 0);
    const Edges& derived = graph.graph.edges();  // they follow the order of adding
    for (std::uint32_t node = 0; node < data_.nodes.size(); ++node) {
      std::uint64_t* const row = ancestors_.data() + node * words;
      for (const std::uint32_t before : derived.before({node})) {
        for (std::size_t i = 0; i < words; ++i) row[i] |= ancestors_[before * words + i];
        if (const std::uint32_t bit = laneless_index_[before]; bit != no_node)
          row[bit / 64] |= std::uint64_t{1} << bit % 64;
      }
    }
  }
  rows_.reserve(tenants.size());
  for (const Tenant& tenant : tenants) {
    Row row{};
    for (const std::uint32_t node : tenant.move_out) {
      if (data_.nodes[node].lane >= 0)
        row.needs[static_cast<std::size_t>(data_.nodes[node].lane)] = data_.nodes[node].lane_position + 1;
      else
        row.has_laneless = true;
    }
    row.seen.fill(std::numeric_limits<std::uint32_t>::max());
    for (const std::uint32_t node : tenant.move_in) {
      for (std::size_t lane = 0; lane < num_lane_kinds; ++lane)
        row.seen[lane] = std::min(row.seen[lane], edges_.clocks.empty() ? 0 : edges_.clocks[node][lane]);
    }
    rows_.push_back(row);
  }
}

bool TenantOrder::ancestor(std::uint32_t a, std::uint32_t b) const {
  if (words_ == 0) return false;
  const std::uint32_t bit = laneless_index_[a];
  return (ancestors_[b * words_ + bit / 64] >> bit % 64 & 1) != 0;
}

// Asked for many pairs: the lanes are compared without a branch for each.
bool TenantOrder::before(std::uint32_t a, std::uint32_t b) const {
  const Row &of = rows_[a], &by = rows_[b];
  std::uint32_t late = 0;
  for (std::size_t lane = 0; lane < num_lane_kinds; ++lane) late |= of.needs[lane] > by.seen[lane] ? 1u : 0u;
  if (late != 0) return false;
  if (!of.has_laneless) return true;
  for (const std::uint32_t out : tenants_[a].move_out) {
    if (data_.nodes[out].lane >= 0) continue;
    for (const std::uint32_t in : tenants_[b].move_in) {
      if (!ancestor(out, in)) return false;
    }
  }
  return true;
}

std::vector<std::uint32_t> TenantOrder::gone_from(const std::vector<std::uint32_t>& of_arena) const {
  constexpr std::uint32_t never    = std::numeric_limits<std::uint32_t>::max();
  std::vector<std::uint32_t> order = of_arena;
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return tenants_[a].first < tenants_[b].first; });
  // For the k-th tenant to move in and all later ones: a lower bound on the progress of every lane. Never decreases
  // with k.
  std::vector<LaneClock> seen(order.size());
  for (std::size_t k = order.size(); k-- > 0;) {
    seen[k] = rows_[order[k]].seen;
    for (std::size_t lane = 0; k + 1 < order.size() && lane < num_lane_kinds; ++lane)
      seen[k][lane] = std::min(seen[k][lane], seen[k + 1][lane]);
  }
  std::vector<std::uint32_t> out;
  for (const std::uint32_t tenant : of_arena) {
    const auto& users = tenants_[tenant].move_out;
    const bool laneless =
        std::any_of(users.begin(), users.end(), [&](std::uint32_t node) { return data_.nodes[node].lane < 0; });
    const auto gone = std::partition_point(seen.begin(), seen.end(), [&](const LaneClock& clock) {
      for (std::size_t lane = 0; lane < num_lane_kinds; ++lane) {
        if (rows_[tenant].needs[lane] > clock[lane]) return true;
      }
      return false;
    });
    const auto k    = static_cast<std::size_t>(gone - seen.begin());
    out.push_back(laneless || k == order.size() ? never
                                                : std::max(tenants_[order[k]].first, tenants_[tenant].last + 1));
  }
  return out;
}

std::vector<Succession> find_successions(const std::vector<Tenant>& tenants, const std::vector<std::uint32_t>& of_arena,
                                         const std::vector<Stay>& stays) {
  struct Holder {
    std::int64_t end;
    std::uint32_t tenant;
    bool second;  // in the second run
  };
  std::vector<std::size_t> order(of_arena.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](auto a, auto b) { return tenants[of_arena[a]].first < tenants[of_arena[b]].first; });
  std::map<std::int64_t, Holder> holders;  // by begin: the latest tenant of each byte
  std::vector<Succession> out;
  for (const bool second : {false, true}) {
    for (const std::size_t i : order) {
      const std::uint32_t tenant = of_arena[i];
      const auto [begin, end]    = stays[i];
      const std::size_t known    = out.size();
      auto at                    = holders.upper_bound(begin);
      if (at != holders.begin()) --at;
      while (at != holders.end() && at->first < end) {
        const auto [from, holder] = *at;
        if (holder.end <= begin) {
          ++at;
          continue;
        }
        // Successions inside the second run were already found in the first.
        const bool told = std::any_of(out.begin() + static_cast<std::ptrdiff_t>(known), out.end(),
                                      [&](const Succession& s) { return s.old_tenant == holder.tenant; });
        if (!holder.second && !told && (!second || holder.tenant != tenant))
          out.push_back({holder.tenant, tenant, second});
        at = holders.erase(at);
        if (from < begin) holders[from] = {begin, holder.tenant, holder.second};
        if (holder.end > end) at = holders.insert_or_assign(end, holder).first;
      }
      holders[begin] = {end, tenant, second};
    }
  }
  return out;
}

}  // namespace stepgraph
