#include "tools/bench/memory/adam_copies.hpp"

#include <algorithm>
#include <cmath>

#include "engine/base/error.hpp"
#include "engine/graph/timeline.hpp"
#include "engine/run/context.hpp"
#include "engine/verify/verify.hpp"
#include "ops/transfers/offload_copy.hpp"
#include "ops/updates/optimizer.hpp"

namespace stepgraph::bench {
namespace {

constexpr double learning_rate = 0.125;

Buffer kept(Graph& graph, const char* name, std::int64_t bytes, Space space, DType type = DType::u8) {
  return graph.buffer(
      {.name = name, .size_bytes = bytes, .type = type, .space = space, .lifetime = Lifetime::persistent});
}
Buffer pinned(Graph& graph, const char* name, std::int64_t count, DType type) {
  return kept(graph, name, count * static_cast<std::int64_t>(size_bytes(type)), Space::pinned, type);
}

// The graph with a node that runs on the host lane, whatever memory the world has.
Graph on_the_host(const Graph& of, Node node) {
  Graph made;
  for (std::uint32_t i = 0; i < of.num_buffers(); ++i) static_cast<void>(made.buffer(of.spec(Buffer{i})));
  NodeSpec spec = of.spec(node);
  spec.kind     = NodeKind::host;
  spec.device   = false;
  spec.lane     = made.lane(of.rank(node), LaneKind::host);
  made.add(spec, of.body(node));
  return made;
}

std::byte pattern(std::size_t i) { return static_cast<std::byte>(i * 2654435761u >> 13); }

}  // namespace

AdamBesideCopies::AdamBesideCopies(World& world, std::int64_t elements, std::int64_t copy_bytes, int copies,
                                   int threads)
    : copy_bytes_(copy_bytes), copies_(copies) {
  weight_   = pinned(graph_, "weight", elements, DType::f32);
  gradient_ = pinned(graph_, "gradient", elements, DType::f32);
  first_    = pinned(graph_, "first", elements, DType::f32);
  second_   = pinned(graph_, "second", elements, DType::f32);
  factor_   = pinned(graph_, "factor", 1, DType::f64);
  rate_     = pinned(graph_, "rate", 1, DType::f64);
  step_     = pinned(graph_, "step", 1, DType::i64);
  if (copies > 0) {
    host_in_    = kept(graph_, "host in", copy_bytes, Space::pinned);
    device_in_  = kept(graph_, "device in", copy_bytes, Space::device);
    device_out_ = kept(graph_, "device out", copy_bytes, Space::device);
    host_out_   = kept(graph_, "host out", copy_bytes, Space::pinned);
  }
  graph_  = on_the_host(graph_, adamw(graph_, {.name     = "adamw",
                                               .weight   = weight_,
                                               .gradient = gradient_,
                                               .first    = first_,
                                               .second   = second_,
                                               .factor   = factor_,
                                               .rate     = rate_,
                                               .step     = step_,
                                               .beta1    = 0.5,
                                               .beta2    = 0.5,
                                               .eps      = 0}));
  update_ = Node{0};
  for (int i = 0; i < copies; ++i) {
    offload_copy(graph_, {.name = str("h2d ", i), .lane = LaneKind::h2d, .to = device_in_, .from = host_in_});
    offload_copy(graph_, {.name = str("d2h ", i), .lane = LaneKind::d2h, .to = host_out_, .from = device_out_});
  }
  verify(graph_);
  program_  = std::make_unique<Program>(graph_, world);
  executor_ = std::make_unique<Executor>(
      ExecutorOptions{.threads = threads, .waiting_lanes = static_cast<int>(program_->num_waiting_lanes())});
  const Memory& memory = program_->memory();
  for (const Buffer buffer : {weight_, first_, second_}) std::ranges::fill(memory.span<float>(buffer), 0.0f);
  std::ranges::fill(memory.span<float>(gradient_), 0.5f);
  memory.span<double>(factor_)[0] = 1;
  memory.span<double>(rate_)[0]   = learning_rate;
  if (copies == 0) return;
  const auto bytes = memory.span<std::byte>(host_in_);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(i);
  memory.write(device_out_, std::span<const std::byte>(bytes));
}

AdamBesideCopies::Rates AdamBesideCopies::run() {
  program_->memory().span<std::int64_t>(step_)[0] = ++steps_;
  Recorder recorder;
  executor_->run(*program_, &recorder);
  const Timeline timeline = recorder.timeline();
  const NodeTime adam     = timeline.nodes[update_.id];
  Rates rates{.adam_s = adam.end_s - adam.begin_s};
  double begin_s = timeline.makespan_s, end_s = 0;
  for (const LaneKind lane : {LaneKind::h2d, LaneKind::d2h}) {
    double bytes = 0;
    for (std::uint32_t i = 0; i < graph_.num_nodes(); ++i) {
      if (graph_.lane(Node{i})->kind != lane) continue;
      const NodeTime& time = timeline.nodes[i];
      begin_s              = std::min(begin_s, time.begin_s);
      end_s                = std::max(end_s, time.end_s);
      const double beside  = std::min(time.end_s, adam.end_s) - std::max(time.begin_s, adam.begin_s);
      if (beside > 0) bytes += static_cast<double>(copy_bytes_) * beside / (time.end_s - time.begin_s);
    }
    (lane == LaneKind::h2d ? rates.h2d_rate : rates.d2h_rate) = bytes / rates.adam_s;
  }
  rates.copies_s = std::max(0.0, end_s - begin_s);
  return rates;
}

void AdamBesideCopies::check() const {
  // With constant gradients each step changes a weight by exactly the learning rate.
  const double expected = -learning_rate * static_cast<double>(steps_);
  for (const float weight : program_->memory().span<float>(weight_)) {
    if (std::abs(static_cast<double>(weight) - expected) <= 1e-4 * std::abs(expected)) continue;
    throw Error(ErrorKind::run, str("adamw: a weight is ", weight, " after ", steps_, " steps (", expected, ")"));
  }
  if (copies_ == 0) return;
  std::vector<std::byte> found(static_cast<std::size_t>(copy_bytes_));
  for (const Buffer buffer : {device_in_, host_out_}) {
    program_->memory().read(buffer, std::span(found));
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (found[i] != pattern(i))
        throw Error(ErrorKind::run, str(graph_.describe(buffer), ": byte ", i, " is wrong after copies"));
    }
  }
}

}  // namespace stepgraph::bench
