#include "engine/simulate/simulate.hpp"

#include <algorithm>
#include <cmath>
#include <queue>

#include "engine/base/error.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/simulate/activities.hpp"
#include "engine/simulate/pools.hpp"
#include "engine/simulate/sharing.hpp"

namespace stepgraph {
namespace simulator {
namespace {

enum class Phase : std::uint8_t { waiting, fixed, work, ended };

// The expected end of an activity's phase. Void if `number` is not the activity's latest.
struct Event {
  double time_s;
  std::uint32_t activity;
  std::uint32_t number;
  friend bool operator>(const Event& a, const Event& b) {
    return a.time_s != b.time_s ? a.time_s > b.time_s : a.activity > b.activity;
  }
};

class Simulation {
 public:
  Simulation(const OrderedGraph& graph, const Machine& machine)
      : graph_(graph.graph),
        edges_(graph.edges),
        machine_(machine),
        activities_(activities_of(graph, machine)),
        sharing_(activities_),
        pools_(machine, activities_),
        waits_for_(activities_.num_before),
        phase_(activities_.size(), Phase::waiting),
        latest_(activities_.size(), 0) {
    timeline_.nodes.resize(graph_.num_nodes());
  }

  // All events of one time are processed before any activity gets a worker or a share because of them.
  Timeline run() {
    for (std::uint32_t i = 0; i < activities_.size(); ++i) {
      if (waits_for_[i] == 0) make_ready(i, none);
    }
    settle();
    while (drop_void_events()) {
      now_s_ = events_.top().time_s;
      do {
        const std::uint32_t activity = events_.top().activity;
        events_.pop();
        end_phase(activity);
      } while (drop_void_events() && events_.top().time_s == now_s_);
      settle();
    }
    if (num_ended_ < activities_.size()) refuse_stuck();
    if (!std::isfinite(now_s_)) {
      throw Error(ErrorKind::config, str("simulate: the step takes ", now_s_,
                                         " s on this machine (a finite time: larger rates, or smaller costs)"));
    }
    timeline_.makespan_s = now_s_;
    return std::move(timeline_);
  }

 private:
  bool drop_void_events() {
    while (!events_.empty() && events_.top().number != latest_[events_.top().activity]) events_.pop();
    return !events_.empty();
  }

  void expect(std::uint32_t activity, double time_s) { events_.push({time_s, activity, ++latest_[activity]}); }

  void make_ready(std::uint32_t activity, std::uint32_t after) {
    activities_.pool[activity] == -1 ? start(activity) : pools_.enqueue(activity, after);
  }

  void settle() {
    started_.clear();
    pools_.dispatch(started_);
    for (const std::uint32_t activity : started_) {
      start(activity);
      note_workers(activity);
    }
    speeds_.clear();
    pools_.share_helpers(speeds_);
    for (const Pools::Speed& speed : speeds_) {
      sharing_.set_cap(speed.activity, activities_.times[speed.activity].speed(speed.helpers));
    }
    settle_crowd();
    forecasts_.clear();
    sharing_.settle(now_s_, forecasts_);
    for (const Forecast& forecast : forecasts_) expect(forecast.activity, forecast.end_s);
  }

  // Lanes slow each other down: Machine::beside.
  void settle_crowd() {
    if (!crowd_changed_) return;
    crowd_changed_     = false;
    std::uint32_t busy = 0;
    for (const std::uint32_t activity : crowd_) busy |= std::uint32_t{1} << activities_.crowd[activity];
    for (const std::uint32_t activity : crowd_) {
      const auto lane = static_cast<LaneKind>(activities_.crowd[activity]);
      sharing_.set_cap(activity, 1 / (activities_.times[activity].own_s * machine_.slowdown(lane, busy)));
    }
  }

  void start(std::uint32_t activity) {
    for (const std::uint32_t node : activities_.nodes_of(activity)) timeline_.nodes[node].begin_s = now_s_;
    const Activities::Time& time = activities_.times[activity];
    if (activities_.demands_of(activity).empty() && !is_helped(activity) && !is_crowded(activity)) {
      phase_[activity] = Phase::work;
      expect(activity, now_s_ + (time.fixed_s + time.own_s));
    } else if (time.fixed_s > 0) {
      phase_[activity] = Phase::fixed;
      expect(activity, now_s_ + time.fixed_s);
    } else {
      begin_work(activity);
    }
  }

  void begin_work(std::uint32_t activity) {
    const double own_s = activities_.times[activity].own_s;
    phase_[activity]   = Phase::work;
    sharing_.begin(activity, own_s > 0 ? 1 / own_s : unlimited);
    if (is_helped(activity)) pools_.begin_helping(activity);
    if (is_crowded(activity)) {
      crowd_.push_back(activity);
      crowd_changed_ = true;
    }
  }

  [[nodiscard]] bool is_helped(std::uint32_t activity) const {
    return activities_.helped[activity] && activities_.times[activity].own_s > 0;
  }

  [[nodiscard]] bool is_crowded(std::uint32_t activity) const {
    return activities_.crowd[activity] >= 0 && activities_.times[activity].own_s > 0;
  }

  void end_phase(std::uint32_t activity) {
    if (phase_[activity] == Phase::fixed) return begin_work(activity);
    phase_[activity] = Phase::ended;
    ++num_ended_;
    if (sharing_.has(activity)) {
      sharing_.end(activity);
      if (is_helped(activity)) pools_.end_helping(activity);
      if (is_crowded(activity)) crowd_changed_ |= std::erase(crowd_, activity) > 0;
    }
    for (const std::uint32_t node : activities_.nodes_of(activity)) timeline_.nodes[node].end_s = now_s_;
    for (const std::uint32_t after : activities_.after_of(activity)) {
      if (--waits_for_[after] == 0) make_ready(after, activity);
    }
    pools_.release(activity);
  }

  // A node's worker comes from the pool the node is bound to, even if its communication takes workers of other pools.
  void note_workers(std::uint32_t activity) {
    const auto nodes   = activities_.nodes_of(activity);
    const auto pools   = activities_.pools_of(activity);
    const auto workers = pools_.workers_of(activity);
    if (nodes.size() == 1) {
      timeline_.nodes[nodes.front()].worker = workers.front();
      return;
    }
    for (const std::uint32_t node : nodes) {
      const NodeRecord& record = graph_.data().nodes[node];
      const auto lane          = record.lane >= 0 ? std::optional(static_cast<LaneKind>(record.lane)) : std::nullopt;
      const auto pool          = static_cast<std::int32_t>(machine_.pool_of(Rank{record.rank}, lane));
      for (std::size_t i = 0; i < pools.size(); ++i) {
        if (pools[i] == pool) timeline_.nodes[node].worker = workers[i];
      }
    }
  }

  // One unfinished edge that an activity waits for, as (waiting node, node that has not ended).
  [[nodiscard]] std::pair<std::uint32_t, std::uint32_t> wait_of(std::uint32_t activity) const {
    for (const std::uint32_t node : activities_.nodes_of(activity)) {
      for (const std::uint32_t before : edges_.before({node})) {
        if (phase_[activities_.of_node[before]] != Phase::ended) return {node, before};
      }
    }
    return {none, none};
  }

  // Either an activity that has begun never ends, because its share of a bus or link is 0 when rounded; or activities
  // wait for each other.
  [[noreturn]] void refuse_stuck() const {
    for (std::uint32_t i = 0; i < activities_.size(); ++i) {
      if (phase_[i] != Phase::fixed && phase_[i] != Phase::work) continue;
      throw Error(ErrorKind::config,
                  str("simulate: ", graph_.describe(Node{activities_.nodes_of(i).front()}),
                      " never ends on this machine: its share of a bus or link is too small for its bytes"));
    }
    throw Error(ErrorKind::graph, describe_cycle());
  }

  // Walks back from a waiting activity until it visits one a second time. Nothing runs any more, so only a cycle can
  // keep an activity from starting.
  [[nodiscard]] std::string describe_cycle() const {
    const auto blocked = std::find(phase_.begin(), phase_.end(), Phase::waiting);
    auto at            = static_cast<std::uint32_t>(blocked - phase_.begin());
    std::vector<std::uint32_t> path;
    std::vector<bool> seen(activities_.size());
    for (; !seen[at]; at = activities_.of_node[wait_of(at).second]) {
      seen[at] = true;
      path.push_back(at);
    }
    path.erase(path.begin(), std::find(path.begin(), path.end(), at));
    constexpr std::size_t most = 8;
    std::string text           = "simulate: these nodes wait for each other:";
    for (std::size_t i = 0; i < std::min(path.size(), most); ++i) {
      const auto [node, before] = wait_of(path[i]);
      text += str("\n    ", graph_.describe(Node{node}), " waits for ", graph_.describe(Node{before}));
      const std::uint32_t next = wait_of(activities_.of_node[before]).first;
      if (next != before) text += str(", which is matched with ", graph_.describe(Node{next}));
    }
    if (path.size() > most) text += str("\n    and so on, ", path.size(), " in all");
    return text;
  }

  const Graph& graph_;
  const Edges& edges_;
  const Machine& machine_;
  const Activities activities_;
  Sharing sharing_;
  Pools pools_;
  Timeline timeline_;
  double now_s_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::uint32_t> waits_for_;  // by activity: edges from activities that have not ended
  std::vector<Phase> phase_;
  std::vector<std::uint32_t> latest_;  // by activity: number of its latest event
  std::uint32_t num_ended_ = 0;
  std::vector<std::uint32_t> crowd_;  // activities that work now and whose lanes slow each other down
  bool crowd_changed_ = false;        // since the last settle
  std::vector<std::uint32_t> started_;
  std::vector<Pools::Speed> speeds_;
  std::vector<Forecast> forecasts_;
};

}  // namespace
}  // namespace simulator

Timeline simulate(const OrderedGraph& graph, const Machine& machine) {
  return simulator::Simulation(graph, machine).run();
}

}  // namespace stepgraph
