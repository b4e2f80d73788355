#include "engine/run/streams.hpp"

#include <algorithm>
#include <array>

#include "engine/base/error.hpp"
#include "engine/run/program/lowering.hpp"
#include "engine/run/runnable_graph.hpp"

namespace stepgraph {
namespace {

constexpr std::uint32_t none = StreamPlan::none;

// For each stream of a rank: the number of its nodes that are known to be done. Counts continue from run to run, so
// that a clock can tell the nodes of this run from those of the previous run.
using Clock = std::array<std::int64_t, num_lane_kinds>;

// Visits nodes in their issue order, and keeps for each the clock of nodes that are done when it starts. The graph is
// walked twice, as two runs one after another: loop edges need the clocks of the first run.
class Walk {
 public:
  Walk(const Graph& graph, const std::vector<std::uint32_t>& stream)
      : stream_(stream),
        known_(graph.ranks().size() * num_lane_kinds),
        place_(graph.num_nodes(), 0),
        at_(graph.num_nodes()),
        sizes_(known_.size(), 0) {}

  // Calls f(node, its clock), which may join other clocks to it, before the node counts as issued.
  template <class F>
  void run(const std::vector<std::uint32_t>& order, const F& f) {
    for (Clock& at : at_) at = {};
    for (const std::uint32_t node : order) {
      Clock clock = stream_[node] == none ? Clock{} : known_[stream_[node]];
      f(node, clock);
      if (stream_[node] != none) {
        place_[node]                  = ++sizes_[stream_[node]];
        clock[kind_of(stream_[node])] = place_[node];
        known_[stream_[node]]         = clock;
      }
      at_[node] = clock;
    }
  }

  [[nodiscard]] static std::size_t kind_of(std::uint32_t stream) { return stream % num_lane_kinds; }
  // Whether the clock says that `before`, of this run, is done.
  [[nodiscard]] bool knows(const Clock& clock, std::uint32_t before) const {
    return stream_[before] != none && clock[kind_of(stream_[before])] >= place_[before];
  }
  void join(Clock& clock, const Clock& other) const {
    for (std::size_t i = 0; i < num_lane_kinds; ++i) clock[i] = std::max(clock[i], other[i]);
  }
  [[nodiscard]] const Clock& at(std::uint32_t node) const { return at_[node]; }

  // The places and clocks of the nodes of the previous run.
  struct Past {
    std::vector<std::int64_t> place;
    std::vector<Clock> at;
  };
  [[nodiscard]] Past past() const { return {place_, at_}; }

 private:
  const std::vector<std::uint32_t>& stream_;
  std::vector<Clock> known_;  // by stream
  std::vector<std::int64_t> place_;
  std::vector<Clock> at_;            // by node
  std::vector<std::int64_t> sizes_;  // by stream
};

bool past_known(const Clock& clock, const Walk::Past& past, const std::vector<std::uint32_t>& stream,
                std::uint32_t node) {
  return stream[node] != none && clock[Walk::kind_of(stream[node])] >= past.place[node];
}

// Latest first: their clocks make waits for earlier nodes unnecessary.
std::vector<std::uint32_t> latest_first(std::span<const std::uint32_t> nodes,
                                        const std::vector<std::uint32_t>& position) {
  std::vector<std::uint32_t> sorted(nodes.begin(), nodes.end());
  std::sort(sorted.begin(), sorted.end(), [&](auto a, auto b) { return position[a] > position[b]; });
  return sorted;
}

std::vector<std::uint32_t> positions(const std::vector<std::uint32_t>& order, std::uint32_t num_nodes) {
  std::vector<std::uint32_t> position(num_nodes);
  for (std::uint32_t i = 0; i < order.size(); ++i) position[order[i]] = i;
  return position;
}

// Work on such a stream would hold up the copies that follow.
bool is_for_copies(LaneKind kind) { return kind == LaneKind::h2d || kind == LaneKind::d2h; }

bool is_on_host_lane(const Graph& graph, std::uint32_t node) {
  const auto lane = graph.lane(Node{node});
  return graph.kind(Node{node}) == NodeKind::host && lane && lane->kind == LaneKind::host;
}

// By node on a stream: the last node of its rank's host lane that it follows, unless its stream has waited for it
// before.
std::vector<std::vector<std::uint32_t>> waits_for_host_lanes(const OrderedGraph& ordered, const StreamPlan& plan,
                                                             const std::vector<std::uint32_t>& position) {
  const Graph& graph = ordered.graph;
  std::vector<std::vector<std::uint32_t>> waits(graph.num_nodes());
  std::vector<std::uint32_t> known(graph.ranks().size() * num_lane_kinds, 0);  // by stream: positions, from 1
  for (const std::uint32_t node : plan.issue_order) {
    if (plan.stream[node] == none) continue;
    std::uint32_t& waited = known[plan.stream[node]];
    for (const std::uint32_t before : latest_first(ordered.edges.before(Node{node}), position)) {
      if (!is_on_host_lane(graph, before) || position[before] < waited) continue;
      waits[node].push_back(before);
      waited = position[before] + 1;
    }
  }
  return waits;
}

std::size_t num_different(std::vector<std::uint32_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return static_cast<std::size_t>(std::unique(numbers.begin(), numbers.end()) - numbers.begin());
}

}  // namespace

std::span<const std::uint32_t> StreamPlan::waits_of(Node node) const {
  return std::span(waits).subspan(wait_begin[node.id], wait_begin[node.id + 1] - wait_begin[node.id]);
}
std::span<const std::uint32_t> StreamPlan::loop_waits_of(Node node) const {
  return std::span(loop_waits).subspan(loop_begin[node.id], loop_begin[node.id + 1] - loop_begin[node.id]);
}

std::span<const std::uint32_t> StreamPlan::host_waits_of(Node node) const {
  return std::span(host_waits).subspan(host_begin[node.id], host_begin[node.id + 1] - host_begin[node.id]);
}

std::size_t StreamPlan::num_streams() const {
  std::vector<std::uint32_t> all = stream;
  std::erase(all, none);
  return num_different(std::move(all));
}

std::size_t StreamPlan::num_events() const {
  std::vector<std::uint32_t> all = waits;
  all.insert(all.end(), loop_waits.begin(), loop_waits.end());
  return num_different(std::move(all));
}

NodeWorkspace StreamPlan::workspace_of(Node node) const {
  const auto found = std::lower_bound(node_workspaces.begin(), node_workspaces.end(), node,
                                      [](const NodeWorkspace& of, Node wanted) { return of.node.id < wanted.id; });
  return found != node_workspaces.end() && found->node == node ? *found : NodeWorkspace{.node = node};
}

Lane StreamPlan::lane_of(std::uint32_t number) const {
  return {ranks[number / num_lane_kinds], static_cast<LaneKind>(number % num_lane_kinds)};
}

std::string StreamPlan::name(std::uint32_t number) const {
  const Lane lane = lane_of(number);
  return str("rank ", lane.rank, " ", lane.kind);
}

StreamPlan plan_streams(const OrderedGraph& ordered, std::span<const std::uint32_t> order,
                        const WorkspaceNeeds& needs) {
  const Graph& graph = ordered.graph;
  const Edges& edges = ordered.edges;
  StreamPlan plan;
  plan.issue_order.assign(order.begin(), order.end());
  plan.ranks = graph.ranks();
  plan.stream.resize(graph.num_nodes());
  const std::vector<std::uint32_t> position = positions(plan.issue_order, graph.num_nodes());
  for (const std::uint32_t node : plan.issue_order) {
    const auto lane   = graph.lane(Node{node});
    const auto kind   = static_cast<std::uint32_t>(lane ? lane->kind : LaneKind::compute);
    const auto place  = static_cast<std::uint32_t>(*graph.ranks().place(graph.rank(Node{node})));
    plan.stream[node] = graph.kind(Node{node}) == NodeKind::host ? none : place * num_lane_kinds + kind;
    if (lane || plan.stream[node] == none || needs.of(graph, Node{node}) > 0) continue;
    const std::vector<std::uint32_t> before = latest_first(edges.before(Node{node}), position);
    const auto on                           = std::find_if(before.begin(), before.end(), [&](auto of) {
      return plan.stream[of] != none && !is_for_copies(plan.lane_of(plan.stream[of]).kind);
    });
    if (on != before.end()) plan.stream[node] = plan.stream[*on];
  }
  std::vector<std::vector<std::uint32_t>> waits(graph.num_nodes()), loops(graph.num_nodes());
  Walk walk(graph, plan.stream);
  const auto wait_for = [&](std::uint32_t node, Clock& clock) {
    waits[node].clear();
    for (const std::uint32_t before : latest_first(edges.before(Node{node}), position)) {
      if (plan.stream[before] != none && !walk.knows(clock, before)) waits[node].push_back(before);
      walk.join(clock, walk.at(before));
    }
  };
  walk.run(plan.issue_order, wait_for);
  const Walk::Past past = walk.past();
  walk.run(plan.issue_order, [&](std::uint32_t node, Clock& clock) {
    wait_for(node, clock);
    for (const std::uint32_t before : latest_first(edges.before_loop(Node{node}), position)) {
      if (plan.stream[before] == none) continue;  // the host has done it
      if (!past_known(clock, past, plan.stream, before)) loops[node].push_back(before);
      walk.join(clock, past.at[before]);
    }
  });
  const auto pack = [](const auto& rows, std::vector<std::uint32_t>& begin, std::vector<std::uint32_t>& all) {
    begin.push_back(0);
    for (const auto& row : rows) {
      all.insert(all.end(), row.begin(), row.end());
      begin.push_back(static_cast<std::uint32_t>(all.size()));
    }
  };
  pack(waits, plan.wait_begin, plan.waits);
  pack(loops, plan.loop_begin, plan.loop_waits);
  pack(waits_for_host_lanes(ordered, plan, position), plan.host_begin, plan.host_waits);
  plan.node_workspaces = node_workspaces(graph, needs);
  for (const WorkspacePlan& workspace : plan_workspaces(graph, needs)) {
    plan.workspace_bytes.resize(graph.ranks().size() * num_lane_kinds);
    plan.workspace_bytes[*graph.ranks().place(workspace.rank) * num_lane_kinds +
                         static_cast<std::size_t>(workspace.lane)] = workspace.size_bytes;
  }
  return plan;
}

StreamPlan plan_streams(const RunnableGraph& graph, const World& world) {
  WorkspaceNeeds needs = workspace_needs(world);
  needs.bodies         = true;
  return plan_streams(graph, issue_order(lower(graph, world), graph.memory()), needs);
}

void check_workspaces(const MemoryPlan& memory, const StreamPlan& plan) {
  for (std::uint32_t stream = 0; stream < plan.workspace_bytes.size(); ++stream) {
    const Lane lane      = plan.lane_of(stream);
    std::int64_t counted = 0;
    for (const WorkspacePlan& workspace : memory.workspaces) {
      if (workspace.rank == lane.rank && workspace.lane == lane.kind) counted = workspace.size_bytes;
    }
    if (plan.workspace_of(stream) <= counted) continue;
    throw Error(
        ErrorKind::config,
        str("program: stream '", plan.name(stream), "' needs ", plan.workspace_of(stream),
            " bytes of workspace, but the memory plan counts ", counted,
            " (MemoryPlanOptions::workspaces = workspace_needs(world), or RunnableGraph(graph, world, options))"));
  }
}

namespace {

// A host lane runs its nodes in issue order, so a wait for one of them is a wait for all before it.
void check_host_waits(const OrderedGraph& ordered, const StreamPlan& plan, const auto& refuse) {
  const Graph& graph                        = ordered.graph;
  const std::vector<std::uint32_t> position = positions(plan.issue_order, graph.num_nodes());
  std::vector<std::uint32_t> waited(graph.ranks().size() * num_lane_kinds, 0);  // by stream: positions, from 1
  for (const std::uint32_t node : plan.issue_order) {
    if (plan.stream[node] == none) continue;
    std::uint32_t& known = waited[plan.stream[node]];
    for (const std::uint32_t before : plan.host_waits_of(Node{node})) known = std::max(known, position[before] + 1);
    for (const std::uint32_t before : ordered.edges.before(Node{node})) {
      if (is_on_host_lane(graph, before) && position[before] >= known) refuse(before, node, false);
    }
  }
}

}  // namespace

void verify_streams(const OrderedGraph& ordered, const StreamPlan& plan, const WorkspaceNeeds& needs) {
  const Graph& graph = ordered.graph;
  const Edges& edges = ordered.edges;
  const auto where   = [&](std::uint32_t of) {
    return plan.stream[of] == none ? std::string("the host") : str("stream '", plan.name(plan.stream[of]), "'");
  };
  const auto refuse = [&](std::uint32_t before, std::uint32_t node, bool loop) {
    throw Error(ErrorKind::graph,
                str("streams: ", graph.describe(Node{node}), " on ", where(node), " may run before ",
                    graph.describe(Node{before}), loop ? " of the run before it" : "", " on ", where(before),
                    " has ended (an event wait of the first for the second is missing)"));
  };
  for (const NodeWorkspace& needed : node_workspaces(graph, needs)) {
    const std::uint32_t node  = needed.node.id;
    const std::int64_t given  = plan.stream[node] == none ? 0 : plan.workspace_of(plan.stream[node]);
    const NodeWorkspace share = plan.workspace_of(needed.node);
    if (share == needed && needed.end() <= given) continue;
    throw Error(ErrorKind::graph,
                str("streams: ", graph.describe(needed.node), " on ", where(node), " needs bytes ", needed.offset_bytes,
                    " to ", needed.end(), " of a workspace, but its stream has ", given, ", of which it gets ",
                    share.offset_bytes, " to ", share.end(), " (its need, apart from parts issued with it)"));
  }
  check_host_waits(ordered, plan, refuse);
  Walk walk(graph, plan.stream);
  std::vector<char> issued(graph.num_nodes(), 0);
  Walk::Past past;
  for (const bool second : {false, true}) {
    std::fill(issued.begin(), issued.end(), 0);
    walk.run(plan.issue_order, [&](std::uint32_t node, Clock& clock) {
      for (const std::uint32_t before : plan.waits_of(Node{node})) {
        if (!issued[before]) refuse(before, node, false);
        walk.join(clock, walk.at(before));
      }
      if (second) {
        for (const std::uint32_t before : plan.loop_waits_of(Node{node})) walk.join(clock, past.at[before]);
      }
      // A host node is done before the nodes that follow it run, and so is all that it has waited for.
      for (const std::uint32_t before : edges.before(Node{node})) {
        if (!issued[before]) refuse(before, node, false);
        if (plan.stream[before] == none) walk.join(clock, walk.at(before));
      }
      for (const std::uint32_t before : edges.before(Node{node})) {
        if (plan.stream[before] != none && !walk.knows(clock, before)) refuse(before, node, false);
      }
      for (const std::uint32_t before : edges.before_loop(Node{node})) {
        if (second && plan.stream[before] != none && !past_known(clock, past, plan.stream, before))
          refuse(before, node, true);
      }
      issued[node] = 1;
    });
    past = walk.past();
  }
}

}  // namespace stepgraph
