#include "engine/look/analysis.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/graph/matching.hpp"

namespace stepgraph {
namespace {

void check(const Graph& graph, const Timeline& timeline) {
  if (timeline.nodes.size() == graph.num_nodes()) return;
  throw Error(ErrorKind::config, str("timeline: it has ", timeline.nodes.size(), " nodes, but the graph has ",
                                     graph.num_nodes(), " (take the timeline of this graph)"));
}

// The nodes that ran, sorted by begin.
std::vector<std::uint32_t> by_begin(const Timeline& timeline) {
  std::vector<std::uint32_t> order;
  order.reserve(timeline.nodes.size());
  for (std::uint32_t node = 0; node < timeline.nodes.size(); ++node) {
    if (timeline.nodes[node].ran()) order.push_back(node);
  }
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::tuple(timeline.nodes[a].begin_s, a) < std::tuple(timeline.nodes[b].begin_s, b);
  });
  return order;
}

// The union of intervals. Intervals must be added in order of begin.
struct Union {
  std::uint32_t count = 0;
  double total        = 0;
  double until        = 0;  // the end of the union so far
  void add(const NodeTime& time) {
    ++count;
    const double from = std::max(time.begin_s, until);
    if (time.end_s > from) {
      total += time.end_s - from;
      until = time.end_s;
    }
  }
};

struct Interval {
  double begin, end;
};
void join(std::vector<Interval>& list, const NodeTime& time) {
  if (!list.empty() && time.begin_s <= list.back().end) {
    list.back().end = std::max(list.back().end, time.end_s);
  } else {
    list.push_back({time.begin_s, time.end_s});
  }
}
double length(const std::vector<Interval>& list) {
  double sum = 0;
  for (const Interval& one : list) sum += one.end - one.begin;
  return sum;
}
double common_length(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  double sum = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
    a[i].end < b[j].end ? ++i : ++j;
  }
  return sum;
}

double share_of(double part, const Timeline& timeline) {
  return timeline.makespan_s > 0 ? part / timeline.makespan_s : 0;
}

// A node's turn on its worker.
struct Turn {
  std::int32_t worker;
  double end_s, begin_s;
  std::uint32_t first, node;  // first: the first of the matched parts
  [[nodiscard]] auto when() const { return std::tuple(worker, end_s, begin_s, first); }
};

// Follows causes backwards. Matched parts count as one, identified by the first of them.
class PathFinder {
 public:
  PathFinder(const Graph& graph, const Edges& edges, const Timeline& timeline)
      : edges_(edges), times_(timeline.nodes), matching_(match_parts(graph)), visited_(times_.size()) {
    for (std::uint32_t node = 0; node < times_.size(); ++node) {
      const NodeTime& time = times_[node];
      if (time.ran() && time.worker >= 0)
        on_worker_.push_back({time.worker, time.end_s, time.begin_s, first_of(node), node});
    }
    std::sort(on_worker_.begin(), on_worker_.end(),
              [](const Turn& a, const Turn& b) { return std::tuple(a.when(), a.node) < std::tuple(b.when(), b.node); });
  }

  std::vector<PathStep> find() {
    std::vector<PathStep> path;
    for (std::uint32_t node = last(); node != no_node;) {
      visited_[first_of(node)]  = true;
      const std::uint32_t cause = cause_of(node);
      const double since        = cause == no_node ? 0 : times_[cause].end_s;
      path.push_back({{node}, std::max(0.0, times_[node].begin_s - since)});
      node = cause;
    }
    std::reverse(path.begin(), path.end());
    return path;
  }

 private:
  [[nodiscard]] std::span<const std::uint32_t> together(const std::uint32_t& node) const {
    const bool alone = matching_.of_node.empty() || matching_.of_node[node] == Matching::none;
    return alone ? std::span(&node, 1) : matching_.meeting(matching_.of_node[node]);
  }
  [[nodiscard]] std::uint32_t first_of(std::uint32_t node) const { return together(node).front(); }

  [[nodiscard]] std::uint32_t last() const {
    std::uint32_t best = no_node;
    for (std::uint32_t node = 0; node < times_.size(); ++node) {
      if (times_[node].ran() && (best == no_node || times_[node].end_s > times_[best].end_s)) best = node;
    }
    return best;
  }

  [[nodiscard]] std::uint32_t cause_of(std::uint32_t node) const {
    std::uint32_t best   = no_node;
    const auto candidate = [&](std::uint32_t other) {
      if (other == no_node || !times_[other].ran() || visited_[first_of(other)]) return;
      if (best == no_node || times_[other].end_s > times_[best].end_s) best = other;
    };
    for (const std::uint32_t part : together(node)) {
      for (const std::uint32_t before : edges_.before({part})) candidate(before);
    }
    // Declared causes come first: the worker is the cause only if nothing else kept the node waiting.
    std::int32_t asked = -1;
    for (const std::uint32_t part : together(node)) {
      if (!times_[part].ran() || times_[part].worker == asked) continue;
      asked = times_[part].worker;
      candidate(before_on_worker(part));
    }
    return best;
  }

  // The node that ended last on the same worker before this node began. Nodes that took no time are ordered by their
  // position in the sorted list, so the walk never cycles.
  [[nodiscard]] std::uint32_t before_on_worker(std::uint32_t node) const {
    const NodeTime& time = times_[node];
    const auto self      = std::tuple(time.worker, time.begin_s, time.begin_s, first_of(node));
    const auto at        = std::partition_point(on_worker_.begin(), on_worker_.end(),
                                                [&](const Turn& turn) { return turn.when() < self; });
    return at == on_worker_.begin() || at[-1].worker != time.worker ? no_node : at[-1].node;
  }

  const Edges& edges_;
  const std::vector<NodeTime>& times_;
  Matching matching_;
  std::vector<bool> visited_;    // by first part
  std::vector<Turn> on_worker_;  // sorted
};

}  // namespace

std::vector<PathStep> critical_path(const OrderedGraph& graph, const Timeline& timeline) {
  check(graph.graph, timeline);
  return PathFinder(graph.graph, graph.edges, timeline).find();
}

std::vector<LaneBusy> busy_lanes(const Graph& graph, const Timeline& timeline) {
  check(graph, timeline);
  const GraphData& data  = graph.data();
  constexpr auto columns = static_cast<std::size_t>(num_lane_kinds) + 1;  // the last column: no lane
  std::vector<Union> unions(data.ranks.size() * columns);
  std::vector<bool> exists(unions.size());
  const auto place = [&](std::uint32_t node) {
    const NodeRecord& record = data.nodes[node];
    const auto column =
        record.lane >= 0 ? static_cast<std::size_t>(record.lane) : static_cast<std::size_t>(num_lane_kinds);
    return record.place * columns + column;
  };
  for (std::uint32_t node = 0; node < data.nodes.size(); ++node) exists[place(node)] = true;
  for (const std::uint32_t node : by_begin(timeline)) unions[place(node)].add(timeline.nodes[node]);
  std::vector<LaneBusy> out;
  for (std::size_t i = 0; i < unions.size(); ++i) {
    if (!exists[i]) continue;
    LaneBusy& lane = out.emplace_back();
    lane.rank      = data.ranks[i / columns];
    if (i % columns < num_lane_kinds) lane.lane = static_cast<LaneKind>(i % columns);
    lane.num_nodes = unions[i].count;
    lane.busy_s    = unions[i].total;
    lane.share     = share_of(lane.busy_s, timeline);
  }
  return out;
}

std::vector<WorkerBusy> busy_workers(const Timeline& timeline) {
  std::vector<Union> unions;
  for (const std::uint32_t node : by_begin(timeline)) {
    const NodeTime& time = timeline.nodes[node];
    if (time.worker < 0) continue;
    const auto worker = static_cast<std::size_t>(time.worker);
    if (worker >= unions.size()) unions.resize(worker + 1);
    unions[worker].add(time);
  }
  std::vector<WorkerBusy> out;
  for (std::size_t i = 0; i < unions.size(); ++i) {
    if (unions[i].count == 0) continue;
    out.push_back(
        {static_cast<std::int32_t>(i), unions[i].count, unions[i].total, share_of(unions[i].total, timeline)});
  }
  return out;
}

std::vector<double> lanes_at_once(const Graph& graph, const Timeline& timeline) {
  check(graph, timeline);
  const GraphData& data = graph.data();
  std::vector<std::vector<Interval>> lanes(data.num_lanes());
  for (const std::uint32_t node : by_begin(timeline)) {
    const NodeRecord& record = data.nodes[node];
    if (record.lane < 0) continue;
    join(lanes[GraphData::lane_index(record)], timeline.nodes[node]);
  }
  std::vector<std::pair<double, int>> changes;
  for (const std::vector<Interval>& lane : lanes) {
    for (const Interval& each : lane) {
      if (each.end <= each.begin) continue;
      changes.emplace_back(each.begin, 1);
      changes.emplace_back(each.end, -1);
    }
  }
  std::sort(changes.begin(), changes.end());  // at equal times, ends sort before begins
  const auto num_lanes =
      std::count_if(data.lane_sizes.begin(), data.lane_sizes.end(), [](auto size) { return size > 0; });
  std::vector<double> out(static_cast<std::size_t>(num_lanes) + 1, 0);
  double since    = 0;
  std::size_t now = 0;
  for (const auto& [time, change] : changes) {
    out[now] += time - since;
    since = time;
    change > 0 ? ++now : --now;
  }
  out[0] += std::max(0.0, timeline.makespan_s - since);
  return out;
}

namespace {

// How long nodes run for which `counts` is true, and for how much of that time other nodes of the rank compute. By
// place.
template <class Hidden, class Counts>
std::vector<Hidden> hidden_behind_compute(const Graph& graph, const Timeline& timeline, const Counts& counts) {
  check(graph, timeline);
  const GraphData& data = graph.data();
  std::vector<std::vector<Interval>> counted(data.ranks.size()), compute(counted);
  for (const std::uint32_t node : by_begin(timeline)) {
    const std::size_t place = data.nodes[node].place;
    if (counts(node)) {
      join(counted[place], timeline.nodes[node]);
    } else if (data.nodes[node].kind == NodeKind::compute) {
      join(compute[place], timeline.nodes[node]);
    }
  }
  std::vector<Hidden> out(counted.size());
  for (std::size_t place = 0; place < out.size(); ++place)
    out[place] = {length(counted[place]), common_length(counted[place], compute[place])};
  return out;
}

}  // namespace

std::vector<HiddenCommunication> hidden_communication(const Graph& graph, const Timeline& timeline) {
  return hidden_behind_compute<HiddenCommunication>(
      graph, timeline, [&](std::uint32_t node) { return graph.data().nodes[node].kind == NodeKind::communicate; });
}

bool is_transfer(const Graph& graph, Node node) {
  if (const auto lane = graph.lane(node)) {
    const LaneKind kind = lane->kind;
    if (kind == LaneKind::h2d || kind == LaneKind::d2h || kind == LaneKind::disk || kind == LaneKind::host) return true;
  }
  unsigned from = 0, to = 0;  // a bit for each space
  for (std::size_t i = 0; i < graph.num_accesses(node); ++i) {
    const auto access        = graph.access(node, i);
    const BufferSpec& buffer = graph.spec(access.buffer);
    if (buffer.token) continue;
    if (reads(access.mode)) from |= 1u << static_cast<unsigned>(buffer.space);
    if (writes(access.mode)) to |= 1u << static_cast<unsigned>(buffer.space);
  }
  return from != 0 && to != 0 && (from & to) == 0;
}

std::vector<HiddenTransfers> hidden_transfers(const Graph& graph, const Timeline& timeline) {
  return hidden_behind_compute<HiddenTransfers>(graph, timeline,
                                                [&](std::uint32_t node) { return is_transfer(graph, Node{node}); });
}

std::vector<MemoryUse> memory_use(const Graph& graph, const Timeline& timeline) {
  check(graph, timeline);
  const GraphData& data = graph.data();
  struct Life {
    double begin = -1, end = -1;
  };
  std::vector<Life> lives(data.buffers.size());
  for (std::uint32_t node = 0; node < data.nodes.size(); ++node) {
    const NodeTime& time = timeline.nodes[node];
    if (!time.ran()) continue;
    for (std::uint32_t i = data.nodes[node].access_begin; i < data.access_end(node); ++i) {
      Life& life = lives[data.accesses[i].buffer()];
      life.begin = life.begin < 0 ? time.begin_s : std::min(life.begin, time.begin_s);
      life.end   = std::max(life.end, time.end_s);
    }
  }
  constexpr std::size_t num_spaces = 3;
  struct Change {
    std::size_t place;
    double time_s;
    std::int64_t bytes;
  };
  std::vector<Change> changes;
  std::vector<std::int64_t> persistent(data.ranks.size() * num_spaces, -1);  // -1: no buffer
  for (std::size_t i = 0; i < data.buffers.size(); ++i) {
    const BufferSpec& buffer = data.buffers[i];
    if (buffer.token) continue;
    const std::size_t place = *data.ranks.place(buffer.rank) * num_spaces + static_cast<std::size_t>(buffer.space);
    persistent[place]       = std::max<std::int64_t>(persistent[place], 0);
    if (buffer.lifetime == Lifetime::persistent) {
      persistent[place] += buffer.size_bytes;
    } else if (lives[i].begin >= 0 && buffer.size_bytes > 0) {
      changes.push_back({place, lives[i].begin, buffer.size_bytes});
      changes.push_back({place, lives[i].end, -buffer.size_bytes});
    }
  }
  std::sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
    return std::tuple(a.place, a.time_s) < std::tuple(b.place, b.time_s);
  });
  std::vector<MemoryUse> out;
  std::size_t next = 0;
  for (std::size_t place = 0; place < persistent.size(); ++place) {
    if (persistent[place] < 0) continue;
    MemoryUse& use = out.emplace_back();
    use.rank       = data.ranks[place / num_spaces];
    use.space      = static_cast<Space>(place % num_spaces);
    use.persistent = use.peak = persistent[place];
    use.samples.push_back({0, use.persistent});
    while (next < changes.size() && changes[next].place == place) {
      const double now   = changes[next].time_s;
      std::int64_t bytes = use.samples.back().bytes;
      for (; next < changes.size() && changes[next].place == place && changes[next].time_s == now; ++next) {
        bytes += changes[next].bytes;
      }
      if (bytes == use.samples.back().bytes) continue;
      if (use.samples.back().time_s == now) use.samples.pop_back();
      use.samples.push_back({now, bytes});
      use.peak = std::max(use.peak, bytes);
    }
  }
  return out;
}

}  // namespace stepgraph
