// Measures copies between the memory of a device and of the host, and updates on the host: as the nodes that a step
// with offload has, each alone and beside each other. They share the memory of the host, so each slows the others down.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/run/device.hpp"
#include "engine/run/executor.hpp"
#include "graphs/predict/trials.hpp"
#include "ops/transfers/offload_copy.hpp"
#include "ops/updates/optimizer.hpp"

namespace stepgraph::trials {
namespace {

// Nodes of one size on one lane.
struct Work {
  LaneKind lane     = LaneKind::h2d;
  std::int64_t size = 0;      // bytes of a copy, elements of an update
  int count         = 1;      // nodes, on different parts of host memory
  bool rounds       = false;  // an update writes the rounded weight too
};

struct Sizes {
  std::int64_t host_bytes;           // for the copies of each direction
  std::int64_t elements;             // that the host updates
  std::vector<std::int64_t> copies;  // in bytes
  std::vector<std::int64_t> updates;
  std::int64_t usual_copy, usual_update;  // for lanes beside each other
  double beside_s;                        // how long lanes run beside each other
};
// Host memory is larger than caches, so that nodes do not find their bytes there.
const Sizes usual_sizes{.host_bytes   = std::int64_t{1} << 29,
                        .elements     = std::int64_t{1} << 26,
                        .copies       = {1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26},
                        .updates      = {1 << 11, 1 << 16, 1 << 20, 1 << 23, 1 << 25},
                        .usual_copy   = 1 << 25,
                        .usual_update = 1 << 22,
                        .beside_s     = 0.08};
const Sizes small_sizes{.host_bytes   = 1 << 18,
                        .elements     = 1 << 16,
                        .copies       = {1 << 12, 1 << 16},
                        .updates      = {1 << 11, 1 << 14},
                        .usual_copy   = 1 << 16,
                        .usual_update = 1 << 14,
                        .beside_s     = 0.0005};

class TransferLab {
 public:
  TransferLab(World& world, int threads, const Sizes& sizes) : world_(world), threads_(threads), sizes_(sizes) {
    Device* const device = world.device();
    memory_              = std::make_shared<Memory>(with_buffers(), device != nullptr ? &device->memory() : nullptr);
    memory_->set_first(factor_, 1.0);
    memory_->set_first(rate_, 1e-3);
    memory_->set_first(step_, std::int64_t{1});
  }

  // The times of all nodes of each work, at once: in a second run, as the first one touches memory. Of several works,
  // only the nodes during which all other works had nodes.
  [[nodiscard]] std::vector<double> seconds(const std::vector<Work>& works) {
    Graph graph = with_buffers();
    std::vector<std::vector<std::uint32_t>> nodes;
    // Caches then hold the last elements, and updates begin with the first ones.
    if (works.front().lane == LaneKind::host) static_cast<void>(add(graph, {LaneKind::host, sizes_.elements}));
    for (const Work& work : works) nodes.push_back(add(graph, work));
    const Program program(with_nodes(graph, run_on_host), world_, memory_);
    Executor executor({.threads = threads_, .waiting_lanes = static_cast<int>(program.num_waiting_lanes())});
    Recorder recorder;
    executor.run(program);
    executor.run(program, &recorder);
    const Timeline timeline = recorder.timeline();
    double begin = 0, end = unlimited;
    for (const auto& row : nodes) {
      begin = std::max(begin, timeline.nodes[row.front()].begin_s);
      end   = std::min(end, timeline.nodes[row.back()].end_s);
    }
    std::vector<double> all;
    for (const auto& row : nodes) {
      std::vector<double> inside, each;
      for (const std::uint32_t node : row) {
        const NodeTime& time = timeline.nodes[node];
        each.push_back(time.end_s - time.begin_s);
        if (time.begin_s >= begin && time.end_s <= end) inside.push_back(each.back());
      }
      all.push_back(std::max(quantile(inside.empty() ? each : inside, 0.5), 1e-9));
    }
    return all;
  }

 private:
  Graph with_buffers() {
    Graph graph(1);
    const auto make = [&](const char* name, std::int64_t bytes, DType type, Space space) {
      return graph.buffer(
          {.name = name, .size_bytes = bytes, .type = type, .space = space, .lifetime = Lifetime::persistent});
    };
    const std::int64_t largest = *std::max_element(sizes_.copies.begin(), sizes_.copies.end());
    source_                    = make("source", sizes_.host_bytes, DType::u8, Space::pinned);
    sink_                      = make("sink", sizes_.host_bytes, DType::u8, Space::pinned);
    up_                        = make("up", largest, DType::u8, Space::device);
    down_                      = make("down", largest, DType::u8, Space::device);
    for (Buffer* const state : {&weight_, &first_, &second_, &gradient_})
      *state = make("state", 4 * sizes_.elements, DType::f32, Space::pinned);
    value_  = make("value", 2 * sizes_.elements, DType::bf16, Space::pinned);
    factor_ = make("factor", 8, DType::f64, Space::pinned);
    rate_   = make("rate", 8, DType::f64, Space::pinned);
    step_   = make("step", 8, DType::i64, Space::pinned);
    return graph;
  }

  std::vector<std::uint32_t> add(Graph& graph, const Work& work) const {
    std::vector<std::uint32_t> nodes;
    const std::int64_t room = work.lane == LaneKind::host ? sizes_.elements : sizes_.host_bytes;
    for (int i = 0; i < work.count; ++i) {
      const std::int64_t at = i * work.size % (room - work.size + 1) / work.size * work.size;
      nodes.push_back(graph.num_nodes());
      if (work.lane == LaneKind::h2d) {
        offload_copy(graph, {.name = "h2d", .to = up_.range(0, work.size), .from = source_.range(at, work.size)});
      } else if (work.lane == LaneKind::d2h) {
        offload_copy(graph, {.name = "d2h",
                             .lane = LaneKind::d2h,
                             .to   = sink_.range(at, work.size),
                             .from = down_.range(0, work.size)});
      } else {
        const auto part = [&](Buffer of) { return of.range(4 * at, 4 * work.size); };
        AdamW update;
        update.name     = "adamw";
        update.weight   = part(weight_);
        update.gradient = part(gradient_);
        update.first    = part(first_);
        update.second   = part(second_);
        update.factor   = factor_;
        update.rate     = rate_;
        update.step     = step_;
        if (work.rounds) update.value = value_.range(2 * at, 2 * work.size);
        adamw(graph, update);
      }
    }
    return nodes;
  }

  // As steps with offload do.
  static void run_on_host(NodeSpec& spec) {
    if (spec.op != "adamw") return;
    spec.kind   = NodeKind::host;
    spec.lane   = Lane{Rank{0}, LaneKind::host};
    spec.device = false;
  }

  World& world_;
  int threads_;
  const Sizes& sizes_;
  Buffer source_, sink_, up_, down_, weight_, first_, second_, gradient_, value_, factor_, rate_, step_;
  std::shared_ptr<Memory> memory_;
};

// The cost of a node: as ops/transfers/offload_copy.cpp and ops/updates/optimizer.cpp count it.
RatePoint point_of(const Work& work, double seconds) {
  const auto size = static_cast<double>(work.size);
  if (work.lane != LaneKind::host) return {0, 2 * size, seconds, seconds};
  return {15 * size, (work.rounds ? 30 : 28) * size, seconds, seconds};
}

std::string gigabytes(const RatePoint& point, double copies) {
  return str(std::round(point.bytes_moved / copies / point.alone_s / 1e8) / 10, " GB/s");
}

}  // namespace

Transfers measure_transfers(World& world, const CalibrateOptions& options, int threads) {
  const Sizes& sizes = options.small ? small_sizes : usual_sizes;
  const auto tell    = [&](const std::string& line) {
    if (options.tell) options.tell(line);
  };
  TransferLab lab(world, threads, sizes);
  Transfers out;
  constexpr int times = 8;
  for (const LaneKind lane : {LaneKind::h2d, LaneKind::d2h}) {
    for (const std::int64_t size : sizes.copies) {
      const Work work{.lane = lane, .size = size, .count = times};
      const RatePoint point = point_of(work, lab.seconds({work})[0]);
      out.ops[std::string(to_string(lane))].push_back(point);
      tell(str(lane, " of ", size, " bytes: ", gigabytes(point, 2)));
    }
  }
  for (const bool rounds : {false, true}) {
    for (const std::int64_t size : sizes.updates) {
      const Work work{.lane = LaneKind::host, .size = size, .count = times, .rounds = rounds};
      const RatePoint point = point_of(work, lab.seconds({work})[0]);
      (rounds ? out.ops_bf16 : out.ops)["adamw@host"].push_back(point);
      tell(str("adamw on the host, ", size, " elements, ", rounds ? "bf16" : "fp32", ": ", gigabytes(point, 1), ", ",
               std::round(static_cast<double>(size) / point.alone_s / 1e7) / 100, " G elements/s"));
    }
  }

  // Lanes beside each other.
  const std::vector<LaneKind> lanes{LaneKind::h2d, LaneKind::d2h, LaneKind::host};
  std::vector<Work> alone;
  std::vector<double> alone_s;
  for (const LaneKind lane : lanes) {
    Work work{.lane   = lane,
              .size   = lane == LaneKind::host ? sizes.usual_update : sizes.usual_copy,
              .count  = 2 * times,
              .rounds = true};
    alone_s.push_back(lab.seconds({work})[0]);
    work.count = std::clamp(static_cast<int>(sizes.beside_s / alone_s.back()), 4, 1000);
    alone.push_back(work);
  }
  for (const std::vector<std::size_t>& together :
       std::vector<std::vector<std::size_t>>{{0, 1}, {0, 2}, {1, 2}, {0, 1, 2}}) {
    std::vector<Work> works;
    for (const std::size_t i : together) works.push_back(alone[i]);
    const std::vector<double> seconds = lab.seconds(works);
    for (std::size_t i = 0; i < together.size(); ++i) {
      Calibration::Beside found{.lane = lanes[together[i]], .factor = std::max(1.0, seconds[i] / alone_s[together[i]])};
      std::string names;
      for (const std::size_t other : together) {
        if (other == together[i]) continue;
        found.others.push_back(lanes[other]);
        names += str(" ", lanes[other]);
      }
      const RatePoint point = point_of(works[i], seconds[i]);
      tell(str(found.lane, " beside", names, ": ", gigabytes(point, found.lane == LaneKind::host ? 1 : 2), ", ",
               std::round(100 * seconds[i] / alone_s[together[i]]) / 100, " times as long as alone"));
      out.beside.push_back(std::move(found));
    }
  }
  // The time `busy` is that beside all others.
  for (Calibration::Ops* const ops : {&out.ops, &out.ops_bf16}) {
    for (auto& [op, points] : *ops) {
      double factor = 1;
      for (const Calibration::Beside& each : out.beside) {
        if (op.starts_with(to_string(each.lane)) || (each.lane == LaneKind::host && op == "adamw@host"))
          factor = std::max(factor, each.factor);
      }
      for (RatePoint& point : points) point.busy_s = point.alone_s * factor;
    }
  }
  return out;
}

}  // namespace stepgraph::trials
