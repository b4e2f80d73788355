#include "engine/simulate/activities.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>

#include "engine/base/error.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/graph/matching.hpp"

namespace stepgraph::simulator {
namespace {

class Builder {
 public:
  Builder(const Graph& graph, const Edges& edges, const Machine& machine)
      : graph_(graph),
        data_(graph.data()),
        edges_(edges),
        machine_(machine),
        network_(machine, static_cast<std::uint32_t>(machine.buses().size())),
        matching_(match_parts(graph)) {}

  Activities build() {
    check_fits();
    list_resources();
    find_bindings();
    group_nodes();
    connect();
    for (std::uint32_t i = 0; i < out_.size(); ++i) {
      demands_.clear();
      pools_.clear();
      const std::uint32_t meeting = matching_.of_node.empty() ? Matching::none : matching_.of_node[lowest(i)];
      meeting == Matching::none ? add_node(lowest(i)) : add_meeting(matching_.meeting(meeting));
      finish_activity();
    }
    return std::move(out_);
  }

 private:
  using Time = Activities::Time;

  [[nodiscard]] std::uint32_t lowest(std::uint32_t activity) const { return out_.nodes[out_.node_begin[activity]]; }

  void check_fits() const {
    if (machine_.num_ranks() != graph_.num_ranks()) {
      throw Error(ErrorKind::config, str("simulate: the graph is for ", graph_.num_ranks(), " ranks, the machine has ",
                                         machine_.num_ranks()));
    }
    machine_.check_complete();
    if (edges_.pred_begin.size() != data_.nodes.size() + 1) {
      throw Error(ErrorKind::config, str("simulate: the edges are for ", edges_.pred_begin.size() - 1,
                                         " nodes, but the graph has ", data_.nodes.size()));
    }
  }

  void list_resources() {
    for (const BusSpec& bus : machine_.buses()) out_.capacities.push_back(bus.bytes_per_s);
    if (!machine_.has_network()) return;
    for (const Machine::Vertex& vertex : machine_.network()) {
      out_.capacities.push_back(vertex.up.bytes_per_s);
      out_.capacities.push_back(vertex.down.bytes_per_s);
    }
  }

  // One entry per lane; the last entry of a rank is for nodes without a lane.
  void find_bindings() {
    for (const Rank rank : graph_.ranks()) {
      slowness_.push_back(machine_.slowness(rank));
      for (std::size_t kind = 0; kind <= num_lane_kinds; ++kind) {
        const auto lane = kind < num_lane_kinds ? std::optional(static_cast<LaneKind>(kind)) : std::nullopt;
        pool_of_lane_.push_back(static_cast<std::int32_t>(machine_.pool_of(rank, lane)));
        bus_of_lane_.push_back(static_cast<std::int32_t>(machine_.bus_of(rank, lane)));
      }
    }
  }

  // Creates an activity for each node that is the lowest of the nodes it runs with.
  void group_nodes() {
    const auto num_nodes = static_cast<std::uint32_t>(data_.nodes.size());
    std::vector<std::uint32_t> members;
    out_.of_node.assign(num_nodes, none);
    out_.nodes.reserve(num_nodes);
    for (std::uint32_t node = 0; node < num_nodes; ++node) {
      if (out_.of_node[node] != none) continue;
      const std::uint32_t activity = out_.size();
      if (matching_.of_node.empty() || matching_.of_node[node] == Matching::none) {
        out_.nodes.push_back(node);
      } else {
        const auto meeting = matching_.meeting(matching_.of_node[node]);
        members.assign(meeting.begin(), meeting.end());
        std::sort(members.begin(), members.end());
        out_.nodes.insert(out_.nodes.end(), members.begin(), members.end());
      }
      out_.node_begin.push_back(static_cast<std::uint32_t>(out_.nodes.size()));
      for (const std::uint32_t member : out_.nodes_of(activity)) out_.of_node[member] = activity;
    }
  }

  void connect() {
    const std::uint32_t size = out_.size();
    out_.num_before.assign(size, 0);
    out_.after_begin.assign(size + 1, 0);
    for (std::uint32_t node = 0; node < data_.nodes.size(); ++node) {
      for (const std::uint32_t before : edges_.before({node})) {
        if (before >= data_.nodes.size()) {
          throw Error(ErrorKind::config, str("simulate: an edge begins at node ", before, ", but the graph has ",
                                             data_.nodes.size(), " nodes"));
        }
        ++out_.num_before[out_.of_node[node]];
        ++out_.after_begin[out_.of_node[before] + 1];
      }
    }
    for (std::uint32_t i = 0; i < size; ++i) out_.after_begin[i + 1] += out_.after_begin[i];
    std::vector<std::uint32_t> next(out_.after_begin.begin(), out_.after_begin.end() - 1);
    out_.after.resize(out_.after_begin.back());
    for (std::uint32_t i = 0; i < size; ++i) {
      for (const std::uint32_t node : out_.nodes_of(i)) {
        for (const std::uint32_t before : edges_.before({node})) out_.after[next[out_.of_node[before]]++] = i;
      }
    }
  }

  const Rate& rate_of(std::uint32_t node) {
    const NodeRecord& record = data_.nodes[node];
    const NodeKind kind      = record.part >= 0 ? NodeKind::communicate : record.kind;
    const std::size_t at     = std::size_t{record.op} * 4 + static_cast<std::size_t>(kind);
    if (at >= rates_.size()) rates_.resize(at + 4, nullptr);
    if (!rates_[at]) rates_[at] = &machine_.rate_of(kind, data_.strings[record.op]);
    return *rates_[at];
  }

  const RateTable* table_of(std::uint32_t node) {
    const NodeRecord& record = data_.nodes[node];
    const NodeKind kind      = record.part >= 0 ? NodeKind::communicate : record.kind;
    const std::size_t at     = std::size_t{record.op} * 4 + static_cast<std::size_t>(kind);
    if (at >= tables_.size()) tables_.resize(at + 4);
    if (!tables_[at]) tables_[at] = machine_.table_of(data_.strings[record.op], kind);
    return *tables_[at];
  }

  [[nodiscard]] std::size_t lane_of(std::uint32_t node) const {
    const NodeRecord& record = data_.nodes[node];
    return record.place * (num_lane_kinds + 1) +
           (record.lane >= 0 ? static_cast<std::size_t>(record.lane) : num_lane_kinds);
  }

  void demand_of_bus(std::uint32_t node, double bytes) {
    const std::int32_t bus = bus_of_lane_[lane_of(node)];
    if (bus < 0 || bytes <= 0 || !std::isfinite(out_.capacities[static_cast<std::size_t>(bus)])) return;
    demands_.push_back({static_cast<std::uint32_t>(bus), bytes});
  }

  [[nodiscard]] const Cost& cost_of(std::uint32_t node) const {
    const Cost& cost = data_.nodes[node].cost;
    if (!(cost.flops >= 0 && std::isfinite(cost.flops) && cost.bytes_moved >= 0 && std::isfinite(cost.bytes_moved))) {
      throw Error(ErrorKind::graph, str("simulate: ", graph_.describe(Node{node}), " costs ", cost.flops, " flops and ",
                                        cost.bytes_moved, " bytes moved (not negative, and finite)"));
    }
    return cost;
  }

  // The time from the node's rate, excluding its traffic. For ops without a rate table.
  Time time_of(std::uint32_t node) {
    const Rate& rate = rate_of(node);
    const Cost& cost = cost_of(node);
    return {rate.overhead_s, std::max(cost.flops / rate.flops_per_s, cost.bytes_moved / rate.bytes_per_s)};
  }

  // The measured time. If all other workers of its pools are idle, the activity takes the measured time alone.
  Time measured(const RateTable& table, double flops, double bytes_moved, double overhead_s) const {
    const RatePoint point = table.at(flops, bytes_moved);
    int others            = -1;
    for (const std::int32_t pool : std::set(pools_.begin(), pools_.end())) {
      if (pool >= 0) others += machine_.pools()[static_cast<std::size_t>(pool)].workers;
    }
    if (others < 1) return {overhead_s, point.alone_s};
    constexpr double least_s = std::numeric_limits<double>::min();  // a table between tiny times may give 0
    return {overhead_s,
            std::max(point.busy_s, least_s),
            std::max(point.alone_s, least_s),
            others,
            point.paired_s > 0 ? std::max(point.paired_s, least_s) : 0,
            point.halved_s > 0 ? std::max(point.halved_s, least_s) : 0};
  }

  // Rates and costs are finite, but the quotient of two of them need not be.
  void add_time(std::uint32_t node, const Time& time) {
    if (!std::isfinite(time.fixed_s + time.own_s + time.alone_s + time.paired_s + time.halved_s)) {
      throw Error(ErrorKind::config,
                  str("simulate: ", graph_.describe(Node{node}), " takes ", time.fixed_s + time.own_s, " s, or ",
                      time.alone_s, " s alone, on this machine (finite times: larger rates, or smaller costs)"));
    }
    out_.times.push_back(time);
  }

  void add_node(std::uint32_t node) {
    pools_.push_back(pool_of_lane_[lane_of(node)]);
    const double slowness = slowness_[data_.nodes[node].place];
    demand_of_bus(node, slowness * cost_of(node).bytes_moved);
    const bool pooled       = pools_.back() >= 0;
    const std::int32_t lane = data_.nodes[node].lane;
    const bool crowded      = !pooled && lane >= 0 && (machine_.crowded_lanes() >> lane & 1U) != 0;
    out_.crowd.push_back(static_cast<std::int8_t>(crowded ? lane : -1));
    const auto slowed = [slowness](Time time) {
      for (double* part : {&time.fixed_s, &time.own_s, &time.alone_s, &time.paired_s, &time.halved_s})
        *part *= slowness;
      return time;
    };
    if (const RateTable* table = table_of(node)) {
      const Cost& cost = data_.nodes[node].cost;
      add_time(node, slowed(measured(*table, cost.flops, cost.bytes_moved, rate_of(node).overhead_s)));
      out_.helped.push_back(pooled);
    } else {
      add_time(node, slowed(time_of(node)));
      out_.helped.push_back(data_.nodes[node].parallel && pooled);
    }
  }

  void add_meeting(std::span<const std::uint32_t> parts) {
    check_complete(parts);
    const bool copies = !machine_.has_network();
    Time time;
    double flops = 0, copied = 0;
    for (const std::uint32_t node : parts) {
      pools_.push_back(pool_of_lane_[lane_of(node)]);
      const Cost& cost   = cost_of(node);
      const Time own     = time_of(node);
      const double bytes = copies ? bytes_in_shared_memory(graph_, Node{node}) : cost.bytes_moved;
      demand_of_bus(node, bytes);
      time.fixed_s = std::max(time.fixed_s, own.fixed_s);
      time.own_s   = std::max(time.own_s, own.own_s);
      flops += cost.flops;
      copied += bytes;
    }
    const RateTable* const table = copies ? table_of(parts.front()) : nullptr;
    if (table != nullptr) {
      time = measured(*table, flops, copied, time.fixed_s);
    } else if (copies) {
      time.own_s = std::max(time.own_s, copied / rate_of(parts.front()).bytes_per_s);
    } else {
      const Traffic traffic = traffic_of(graph_, parts);
      time.fixed_s +=
          traffic.rounds * network_.largest_latency(traffic) + traffic.messages * machine_.message_overhead_s();
      network_.add_demands(traffic, demands_);
    }
    add_time(parts.front(), time);
    out_.crowd.push_back(-1);
    const bool pooled = std::any_of(pools_.begin(), pools_.end(), [](std::int32_t pool) { return pool >= 0; });
    out_.helped.push_back(pooled && copies);
  }

  // Every counterpart on a rank of this graph must be present; verify gives the details.
  void check_complete(std::span<const std::uint32_t> parts) const {
    const auto& first          = data_.parts[static_cast<std::size_t>(data_.nodes[parts.front()].part)];
    const std::size_t expected = point_to_point(first.op) ? (graph_.holds(first.peer) ? 2 : 1)
                                                          : graph_.ranks().num_in(data_.groups[first.group].ranks);
    if (parts.size() == expected) return;
    throw Error(ErrorKind::graph,
                str("simulate: ", graph_.describe(Node{parts.front()}), " (", to_string(first.op), " on group '",
                    data_.groups[first.group].name, "') has ", parts.size() - 1, " matching parts instead of ",
                    expected - 1, " (verify names the missing ranks)"));
  }

  void finish_activity() {
    std::sort(demands_.begin(), demands_.end(),
              [](const Demand& a, const Demand& b) { return a.resource < b.resource; });
    for (const Demand& demand : demands_) {
      if (out_.demands.size() > out_.demand_begin.back() && out_.demands.back().resource == demand.resource) {
        out_.demands.back().amount += demand.amount;
      } else {
        out_.demands.push_back(demand);
      }
    }
    out_.demand_begin.push_back(static_cast<std::uint32_t>(out_.demands.size()));

    std::sort(pools_.begin(), pools_.end());
    pools_.erase(std::unique(pools_.begin(), pools_.end()), pools_.end());
    if (!pools_.empty() && pools_.front() < 0) pools_.erase(pools_.begin());
    if (pools_.size() <= 1) {
      out_.pool.push_back(pools_.empty() ? -1 : pools_.front());
      return;
    }
    out_.pool.push_back(-2 - static_cast<std::int32_t>(out_.pools_begin.size() - 1));
    out_.pools.insert(out_.pools.end(), pools_.begin(), pools_.end());
    out_.pools_begin.push_back(static_cast<std::uint32_t>(out_.pools.size()));
  }

  const Graph& graph_;
  const GraphData& data_;
  const Edges& edges_;
  const Machine& machine_;
  Network network_;
  Matching matching_;
  Activities out_;
  std::vector<double> slowness_;                          // by place of the rank
  std::vector<std::int32_t> pool_of_lane_, bus_of_lane_;  // [place * (num_lane_kinds + 1) + kind]
  std::vector<const Rate*> rates_;                        // [op * 4 + kind]; null: not looked up yet
  std::vector<std::optional<const RateTable*>> tables_;   // [op * 4 + kind]; none: not looked up yet
  std::vector<Demand> demands_;                           // of the activity being added
  std::vector<std::int32_t> pools_;
};

}  // namespace

Activities activities_of(const OrderedGraph& graph, const Machine& machine) {
  return Builder(graph.graph, graph.edges, machine).build();
}

}  // namespace stepgraph::simulator
