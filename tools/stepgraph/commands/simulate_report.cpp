#include "tools/stepgraph/commands/simulate_report.hpp"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"
#include "engine/look/analysis.hpp"
#include "engine/look/op_times.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/predict/offload_report.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

std::string percent(double share) { return str(short_number(100 * share, 3), "%"); }

// The share of communication during which the same rank computes.
double overlap_of(const StepPrediction& prediction) {
  HiddenCommunication all;
  for (const HiddenCommunication& rank : hidden_communication(prediction.step.graph, prediction.timeline)) {
    all.communicate_s += rank.communicate_s;
    all.hidden_s += rank.hidden_s;
  }
  return all.share();
}

JsonValue step_fields(const StepPrediction& prediction) {
  const auto layout = prediction.step.layout.spec();
  return {{"type", "simulate"},
          {"step_s", prediction.step_s()},
          {"tokens_per_s", prediction.tokens_per_s},
          {"layout", to_string(layout)},
          {"ranks", layout.num_ranks()}};
}

std::string step_text(const StepPrediction& prediction) {
  return str("simulated step: ", short_number(1e3 * prediction.step_s(), 4), " ms",
             prediction.step.window.empty() ? "" : str(" in a window of ", prediction.step.window.size()), ", ",
             short_number(prediction.tokens_per_s), " tokens/s on ");
}

void print_ops(const StepPrediction& prediction, bool json) {
  const auto ops = op_times(prediction.step.graph, prediction.timeline);
  if (json) {
    for (const OpTime& op : ops) {
      print_line(json_line({{"type", "op"},
                            {"op", op.op},
                            {"nodes", op.num_tasks},
                            {"seconds", op.seconds},
                            {"flops", op.flops},
                            {"bytes_moved", op.bytes_moved}}));
    }
    return;
  }
  constexpr std::size_t most = 10;
  double all_s               = 0;
  for (const OpTime& op : ops) all_s += op.seconds;
  for (std::size_t i = 0; i < std::min(most, ops.size()); ++i) {
    std::ostringstream line;
    line << std::right << std::setw(7) << percent(all_s > 0 ? ops[i].seconds / all_s : 0) << "  " << std::left
         << std::setw(38) << ops[i].op << short_number(1e3 * ops[i].seconds, 4) << " ms in " << ops[i].num_tasks
         << (ops[i].num_tasks == 1 ? " node" : " nodes");
    print_line(line.str());
  }
}

// Of the ranks' compute lanes, on average.
double compute_busy(const StepPrediction& prediction) {
  double busy = 0;
  for (const LaneBusy& lane : busy_lanes(prediction.step.graph, prediction.timeline)) {
    if (lane.lane == LaneKind::compute) busy += lane.share / prediction.step.layout.num_ranks();
  }
  return busy;
}

// All flops of the step's nodes, recomputation included, for each device and second.
double flops_per_device_s(const StepPrediction& prediction) {
  double flops = 0;
  for (std::uint32_t i = 0; i < prediction.step.graph.num_nodes(); ++i)
    flops += prediction.step.graph.cost(Node{i}).flops;
  return flops / prediction.step.layout.num_ranks() / prediction.makespan_s();
}

}  // namespace

void print_prediction(const StepPrediction& prediction, const Calibration& calibration, bool json) {
  const bool on_device  = !calibration.device.empty();
  const int num_workers = on_device ? prediction.step.layout.num_ranks() : calibration.threads;
  double busy           = 0;  // share of the step, over all workers
  for (const WorkerBusy& worker : busy_workers(prediction.timeline)) busy += worker.share / num_workers;
  const double overlap = overlap_of(prediction), bubble = pipeline_bubble(prediction.step, prediction.timeline);
  // Only devices have a bound: threads of a CPU run the nodes of all lanes, so no lane decides how long a step takes.
  const PredictedStep least = on_device ? predicted_step(prediction.step.graph, prediction.timeline) : PredictedStep{};
  const double bound_s = least.seconds > 0 ? least.bound_s * prediction.step_s() / least.seconds : 0;  // of one step
  if (json) {
    JsonValue line = step_fields(prediction);
    if (on_device) line.add({{"bound", least.bound}, {"bound_s", bound_s}});
    line.add({{"threads", calibration.threads},
              {"host", calibration.host},
              {"device", calibration.device},
              {"workers_busy", busy},
              {"overlap", overlap},
              {"bubble", bubble},
              {"peak_bytes", prediction.peak_bytes()},
              {"host_bytes", prediction.host_bytes()},
              {"disk_bytes", prediction.disk_bytes()},
              {"nodes", prediction.step.graph.num_nodes()},
              {"unmeasured", prediction.unmeasured}});
    print_line(json_line(line));
  } else {
    print_line(str(step_text(prediction), num_workers,
                   on_device ? str(" ", calibration.device, " and ", calibration.threads) : "", " of ",
                   calibration.cores, " cores of ", calibration.host, on_device ? "\ndevices busy " : "\nworkers busy ",
                   percent(busy), ", communication hidden ", percent(overlap), "; pipeline bubble ", percent(bubble),
                   " with one device per rank"));
    if (on_device) print_line(str("at least ", short_number(1e3 * bound_s, 4), " ms, bound by ", least.bound));
  }
  print_ops(prediction, json);
}

void print_prediction(const StepPrediction& prediction, const Cluster& cluster, bool json) {
  const double overlap = overlap_of(prediction), bubble = pipeline_bubble(prediction.step, prediction.timeline),
               busy = compute_busy(prediction), flops = flops_per_device_s(prediction),
               share      = flops / cluster.flops_per_s.at(prediction.step.type);
  const std::int64_t peak = prediction.peak_bytes();
  const bool fits         = peak <= cluster.memory_bytes;
  if (json) {
    JsonValue line = step_fields(prediction);
    line.add({{"cluster", cluster.name},
              {"cluster_nodes", cluster.nodes},
              {"devices_per_node", cluster.devices_per_node},
              {"compute_busy", busy},
              {"overlap", overlap},
              {"bubble", bubble},
              {"flops_per_device_s", flops},
              {"share_of_peak", share},
              {"peak_bytes", peak},
              {"host_bytes", prediction.host_bytes()},
              {"disk_bytes", prediction.disk_bytes()},
              {"memory_bytes", cluster.memory_bytes},
              {"fits", fits},
              {"nodes", prediction.step.graph.num_nodes()}});
    print_line(json_line(line));
  } else {
    const auto bytes = [](std::int64_t number) { return bytes_text(static_cast<double>(number)); };
    print_line(str(
        step_text(prediction), prediction.step.layout.num_ranks(), " of ", cluster.num_devices(), " devices (",
        cluster.name, ", ", cluster.nodes, " x ", cluster.devices_per_node, ")\ncompute lanes busy ", percent(busy),
        ", communication hidden ", percent(overlap), "; pipeline bubble ", percent(bubble), "; ",
        short_number(flops / 1e12, 3), " TFLOP/s on each device, ", percent(share),
        " of its peak\nmemory: ", fits ? "at most " : str("does not fit: rank ", prediction.peak_rank(), " needs "),
        bytes(peak), fits ? " of the " : ", a device has ", bytes(cluster.memory_bytes), fits ? " of a device" : ""));
  }
  print_ops(prediction, json);
}

}  // namespace stepgraph::cli
