// The machine of the simulator that a calibration describes.
#include <algorithm>

#include "engine/base/error.hpp"
#include "engine/base/types.hpp"
#include "graphs/predict/calibration.hpp"
#include "graphs/predict/trials.hpp"

namespace stepgraph {
namespace {

constexpr double streaming_intensity   = 4;  // flops per byte; ops below it are limited by memory
constexpr std::string_view host_suffix = "@host";

bool is_on_host(std::string_view op) { return op.ends_with(host_suffix); }

// The rate of ops without measurements: of those on the host, or of the others.
Rate usual_rate(const Calibration& calibration, const Calibration::Ops& ops, bool on_host) {
  Rate rate{.flops_per_s = 0, .overhead_s = calibration.node_overhead_s};
  std::vector<double> streams;
  for (const auto& [op, points] : ops) {
    if (is_on_host(op) != on_host || (!calibration.device.empty() && trials::is_transfer(op))) continue;
    for (const RatePoint& point : points) {
      rate.flops_per_s = std::max(rate.flops_per_s, point.flops / point.busy_s);
      if (point.bytes_moved > 0 && point.flops <= streaming_intensity * point.bytes_moved)
        streams.push_back(point.bytes_moved / point.busy_s);
    }
  }
  if (rate.flops_per_s <= 0) rate.flops_per_s = unlimited;
  if (!streams.empty()) {
    std::nth_element(streams.begin(), streams.begin() + static_cast<std::ptrdiff_t>(streams.size() / 2), streams.end());
    rate.bytes_per_s = streams[streams.size() / 2];
  }
  return rate;
}

// Each rank has a device. Nodes of a device that have no lane run on its streams too, so that they wait for its worker.
Machine on_devices(const Calibration& calibration, const Calibration::Ops& ops, int num_ranks) {
  Machine machine  = device_machine({.ranks = num_ranks});  // for links and disks that were not measured
  const Rate usual = usual_rate(calibration, ops, false);
  Rate host        = usual_rate(calibration, ops, true);
  host.overhead_s  = 0;
  for (const NodeKind kind : {NodeKind::compute, NodeKind::communicate, NodeKind::copy}) machine.rate(kind, usual);
  machine.rate(NodeKind::host, host);
  for (const auto& [op, points] : ops) {
    const RateTable table(points);
    if (is_on_host(op)) {
      machine.rate(op.substr(0, op.size() - host_suffix.size()), NodeKind::host, table);
    } else {
      for (const NodeKind kind : {NodeKind::compute, NodeKind::copy}) machine.rate(op, kind, table);
    }
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    const PoolId device = machine.pool({.name = str("device of rank ", rank)});
    machine.bind({.rank = Rank{rank}, .lane = LaneKind::compute}, device);
    machine.bind({.rank = Rank{rank}, .laneless = true}, device);
  }
  for (const Calibration::Beside& each : calibration.beside) machine.beside(each.lane, each.others, each.factor);
  return machine;
}

// Work per second of an op at a size, beside all other lanes of `beside`; 0: not measured.
double rate_of(const Calibration& calibration, std::string_view op, double flops, double bytes, double amount,
               std::optional<LaneKind> lane) {
  const Calibration::Ops ops = ops_of(calibration, DType::bf16);
  const auto found           = ops.find(std::string(op));
  if (found == ops.end()) return 0;
  double factor = 1;
  for (const Calibration::Beside& each : calibration.beside) {
    if (lane == each.lane) factor = std::max(factor, each.factor);
  }
  return amount / (RateTable(found->second).at(flops, bytes).alone_s * factor);
}

}  // namespace

Calibration::Ops ops_of(const Calibration& calibration, DType param) {
  // A processor widens fp16 to fp32; only bf16 has instructions of its own there.
  if (size_bytes(param) != 2 || (param == DType::f16 && calibration.device.empty())) return calibration.ops;
  Calibration::Ops ops = calibration.ops_bf16;
  ops.insert(calibration.ops.begin(), calibration.ops.end());
  return ops;
}

std::string op_name(const Calibration& calibration, const Graph& graph, Node node) {
  std::string name(graph.op(node));
  const bool on_host = !calibration.device.empty() && graph.kind(node) == NodeKind::host && !name.empty();
  return on_host ? name + std::string(host_suffix) : name;
}

Machine calibrated_machine(const Calibration& calibration, int num_ranks, DType param) {
  const Calibration::Ops ops = ops_of(calibration, param);
  if (!calibration.device.empty()) return on_devices(calibration, ops, num_ranks);
  const Rate usual = usual_rate(calibration, ops, false);
  Machine machine  = loopback_machine({.ranks   = num_ranks,
                                       .threads = calibration.threads,
                                       .rates = {.compute = usual, .communicate = usual, .copy = usual, .host = usual}});
  for (const auto& [op, points] : ops) machine.rate(op, RateTable(points));
  return machine;
}

OffloadRates offload_rates(const Calibration& calibration) {
  constexpr double elements = 1 << 23, copied = 1 << 26;  // of the cuts of usual weights
  OffloadRates rates = usual_offload_rates;
  const auto set     = [](double& rate, double found) {
    if (found > 0) rate = found;
  };
  // A copy reads and writes its bytes. An update has 15 flops for each element, and reads and writes f32 weights and
  // moments, an f32 gradient and the rounded weight (ops/updates/optimizer.cpp).
  set(rates.h2d_bytes_per_s, rate_of(calibration, "h2d", 0, 2 * copied, copied, LaneKind::h2d));
  set(rates.d2h_bytes_per_s, rate_of(calibration, "d2h", 0, 2 * copied, copied, LaneKind::d2h));
  set(rates.host_elements_per_s,
      rate_of(calibration, "adamw@host", 15 * elements, 30 * elements, elements, LaneKind::host));
  set(rates.device_elements_per_s, rate_of(calibration, "adamw", 15 * elements, 30 * elements, elements, {}));
  return rates;
}

}  // namespace stepgraph
