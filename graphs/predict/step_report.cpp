#include "graphs/predict/step_report.hpp"

#include <algorithm>
#include <chrono>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/look/analysis.hpp"
#include "engine/run/packed.hpp"
#include "graphs/predict/prediction.hpp"

namespace stepgraph {

StepSize step_size(const StepGraph& step, const MemoryPlan& plan) {
  StepSize size{.nodes       = static_cast<std::int64_t>(step.graph.num_nodes()),
                .edges       = static_cast<std::int64_t>(plan.edges.preds.size()),
                .reuse_edges = static_cast<std::int64_t>(plan.num_reuse_edges())};
  for (const Rank rank : step.graph.ranks()) {
    size.peak_bytes.push_back(plan.device_bytes(rank));
    size.host_bytes.push_back(plan.arena(rank, Space::pinned).size_bytes);
    size.disk_bytes.push_back(plan.arena(rank, Space::disk).size_bytes);
  }
  return size;
}

StepSize step_size(const StepRun& run) {
  const StepSize mine = step_size(run.step(), run.plan());
  if (run.peers() == nullptr) return mine;
  Packer sent;
  sent.add(mine.nodes).add(mine.edges).add(mine.reuse_edges);
  for (std::size_t i = 0; i < mine.peak_bytes.size(); ++i) {
    sent.add(run.step().ranks.ranks()[i]);
    sent.add(mine.peak_bytes[i]).add(mine.host_bytes[i]).add(mine.disk_bytes[i]);
  }
  const std::vector<std::int64_t> zeros(static_cast<std::size_t>(run.step().layout.num_ranks()));
  StepSize all{.peak_bytes = zeros, .host_bytes = zeros, .disk_bytes = zeros};
  for (const Bytes& bytes : run.peers()->gather("the size of the step", sent.take())) {
    Unpacker received(bytes);
    all.nodes += received.get<std::int64_t>();
    all.edges += received.get<std::int64_t>();
    all.reuse_edges += received.get<std::int64_t>();
    while (!received.empty()) {
      const auto rank         = static_cast<std::size_t>(index(received.get<Rank>()));
      all.peak_bytes.at(rank) = received.get<std::int64_t>();
      all.host_bytes.at(rank) = received.get<std::int64_t>();
      all.disk_bytes.at(rank) = received.get<std::int64_t>();
    }
  }
  return run.is_first() ? all : mine;
}

StepFigures step_figures(const StepView& run, const Timeline& timeline) {
  const StepGraph& step = run.step;
  const auto num_steps  = static_cast<double>(std::max<std::size_t>(1, step.window.size()));
  StepFigures mine{.step_s = timeline.makespan_s / num_steps};
  std::int64_t num_workers = 0;
  double busy = 0, communicate_s = 0, hidden_s = 0;
  for (const WorkerBusy& worker : busy_workers(timeline)) {
    busy += worker.share;
    ++num_workers;
  }
  for (const HiddenCommunication& rank : hidden_communication(step.graph, timeline)) {
    communicate_s += rank.communicate_s;
    hidden_s += rank.hidden_s;
  }
  for (const Rank rank : step.graph.ranks()) {
    mine.planned_bytes = std::max(mine.planned_bytes, run.runnable.memory()->arena(rank).size_bytes);
    mine.used_bytes    = std::max(mine.used_bytes, run.memory.used_bytes(rank));
  }
  std::vector<Costs> costs = stage_costs(step, timeline);
  if (run.peers != nullptr) {
    Packer sent;
    sent.add(mine).add(num_workers).add(busy).add(communicate_s).add(hidden_s);
    sent.add_list(std::span<const Costs>(costs));
    const std::vector<Bytes> all = run.peers->gather("figures of a step", sent.take());
    for (std::size_t process = 1; process < all.size(); ++process) {
      Unpacker received(all[process]);
      const auto other   = received.get<StepFigures>();
      mine.step_s        = std::max(mine.step_s, other.step_s);
      mine.planned_bytes = std::max(mine.planned_bytes, other.planned_bytes);
      mine.used_bytes    = std::max(mine.used_bytes, other.used_bytes);
      num_workers += received.get<std::int64_t>();
      busy += received.get<double>();
      communicate_s += received.get<double>();
      hidden_s += received.get<double>();
      const std::vector<Costs> added = received.get_list<Costs>();
      for (std::size_t stage = 0; stage < costs.size() && stage < added.size(); ++stage) {
        costs[stage].F += added[stage].F;
        costs[stage].I += added[stage].I;
        costs[stage].W += added[stage].W;
      }
    }
  }
  mine.workers_busy   = num_workers > 0 ? busy / static_cast<double>(num_workers) : 0;
  mine.hidden         = HiddenCommunication{.communicate_s = communicate_s, .hidden_s = hidden_s}.share();
  const bool is_first = run.peers == nullptr || run.peers->process() == 0;
  mine.bubble         = is_first ? pipeline_bubble(step, costs) : 0;
  mine.efficiency     = is_first ? pipeline_efficiency(step, costs) : 0;
  return mine;
}

namespace {

// How much later than the first process this one has begun, by one clock.
double later_s(Peers& peers, std::chrono::steady_clock::time_point began) {
  const std::int64_t mine = (began.time_since_epoch() + clock_offset(peers)) / std::chrono::nanoseconds(1);
  std::int64_t first      = mine;
  for (const Bytes& bytes : peers.gather("begin of a step", Packer().add(mine).take()))
    first = std::min(first, Unpacker(bytes).get<std::int64_t>());
  const Bytes told = peers.broadcast("begin of a step", peers.process() == 0 ? Packer().add(first).take() : Bytes());
  return static_cast<double>(mine - Unpacker(told).get<std::int64_t>()) * 1e-9;
}

}  // namespace

void write_step_trace(const StepView& run, const Recorder& recorder, const std::string& path,
                      const TraceOptions& options) {
  const Timeline timeline = recorder.timeline();
  Peers* const peers      = run.peers;
  if (peers == nullptr) return write_trace(run.runnable, timeline, path, options);
  const TracePart mine =
      trace_part(run.runnable, timeline, peers->process(), later_s(*peers, recorder.began()), options);
  std::vector<TracePart> parts;
  for (const Bytes& bytes :
       peers->gather("trace of a step", Packer().add(mine.num_nodes).add_text(mine.events).take())) {
    Unpacker received(bytes);
    const auto num_nodes = received.get<std::int64_t>();
    parts.push_back({received.get_text(), num_nodes});
  }
  in_first(peers, "a written trace", [&] { join_trace(parts, run.step.layout.num_ranks(), path, options); });
}

}  // namespace stepgraph
