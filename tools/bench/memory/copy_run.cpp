#include "tools/bench/memory/copy_run.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "engine/base/quantile.hpp"
#include "engine/look/analysis.hpp"
#include "engine/look/trace.hpp"
#include "engine/verify/verify.hpp"
#include "ops/layers/linear.hpp"
#include "ops/transfers/reduce.hpp"

namespace stepgraph::bench {
namespace {

Buffer kept(Graph& graph, const char* name, std::int64_t bytes, Space space, DType type = DType::u8) {
  return graph.buffer(
      {.name = name, .size_bytes = bytes, .type = type, .space = space, .lifetime = Lifetime::persistent});
}

// Pseudo-random bytes: a copy to the wrong place is found.
std::vector<std::byte> pattern(std::int64_t bytes) {
  std::vector<std::byte> out(static_cast<std::size_t>(bytes));
  std::uint32_t state = 1;
  for (std::byte& each : out) {
    state = state * 1664525u + 1013904223u;
    each  = static_cast<std::byte>(state >> 24);
  }
  return out;
}

// Pseudo-random numbers: products of zeros would be faster than those of a model. `largest` keeps the size of the
// numbers in a chain of products.
std::vector<bf16> numbers(std::int64_t width, float largest) {
  std::vector<bf16> out(static_cast<std::size_t>(width * width));
  std::uint32_t state = 7;
  for (bf16& each : out) {
    state = state * 1664525u + 1013904223u;
    each  = bf16(largest * (static_cast<float>(state >> 8) * 0x1p-23f - 1));
  }
  return out;
}

struct Span {
  double begin_s = -1, end_s = -1;
  [[nodiscard]] double seconds() const { return end_s - begin_s; }
};
Span span_of(const Graph& graph, const Timeline& timeline, LaneKind lane) {
  Span out;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    if (graph.lane(Node{node})->kind != lane) continue;
    const NodeTime& time = timeline.nodes[node];
    if (out.begin_s < 0 || time.begin_s < out.begin_s) out.begin_s = time.begin_s;
    out.end_s = std::max(out.end_s, time.end_s);
  }
  return out;
}

}  // namespace

CopyRun::CopyRun(const CopyShape& shape, World& world, int threads) : shape_(shape), executor_({.threads = threads}) {
  if (shape.h2d > 0) {
    host_in_   = kept(graph_, "host in", shape.bytes, Space::pinned);
    device_in_ = kept(graph_, "device in", shape.bytes, Space::device);
  }
  if (shape.d2h > 0) {
    device_out_ = kept(graph_, "device out", shape.bytes, Space::device);
    host_out_   = kept(graph_, "host out", shape.bytes, Space::pinned);
  }
  for (int i = 0; i < shape.h2d; ++i) {
    stepgraph::copy(graph_, {.name = str("h2d ", i), .lane = LaneKind::h2d, .to = device_in_, .from = host_in_});
  }
  for (int i = 0; i < shape.d2h; ++i) {
    stepgraph::copy(graph_, {.name = str("d2h ", i), .lane = LaneKind::d2h, .to = host_out_, .from = device_out_});
  }
  Buffer left, right;
  if (shape.products > 0) {
    const std::int64_t bytes = 2 * shape.width * shape.width;
    left                     = kept(graph_, "left", bytes, Space::device, DType::bf16);
    right                    = kept(graph_, "right", bytes, Space::device, DType::bf16);
    WeightTable weights;
    weights.add({.name = "right", .shape = {shape.width, shape.width}, .value = right});
    Tape tape({.graph = &graph_, .weights = &weights, .type = DType::bf16, .seq = shape.width, .records = false});
    Tensor x = tape.input(left, {shape.width, shape.width}, DType::bf16, false);
    for (int i = 0; i < shape.products; ++i) x = linear(tape, {.x = x, .weight = tape.weight("right")});
  }
  runnable_.emplace(graph_, world, MemoryPlanOptions{});
  verify(*runnable_);
  program_                           = std::make_unique<Program>(*runnable_, world);
  const Memory& memory               = program_->memory();
  const std::vector<std::byte> bytes = pattern(shape.bytes);
  if (shape.h2d > 0) memory.write(host_in_, std::span(bytes));
  if (shape.d2h > 0) memory.write(device_out_, std::span(bytes));
  if (shape.products > 0) {
    const auto set = [&](Buffer to, float largest) {
      const std::vector<bf16> values = numbers(shape.width, largest);
      memory.write(to, std::span(values));
    };
    set(left, 1);
    set(right, std::sqrt(3.0f / static_cast<float>(shape.width)));
  }
}

CopyTimes CopyRun::run() {
  Recorder recorder;
  executor_.run(*program_, &recorder);
  timeline_      = recorder.timeline();
  const Span h2d = span_of(graph_, timeline_, LaneKind::h2d), d2h = span_of(graph_, timeline_, LaneKind::d2h);
  const auto rate = [&](int copies, const Span& span) {
    return static_cast<double>(copies) * static_cast<double>(shape_.bytes) / span.seconds();
  };
  CopyTimes out;
  Span all{0, timeline_.makespan_s}, any;
  const auto add = [&](const Span& span) {
    all       = {std::max(all.begin_s, span.begin_s), std::min(all.end_s, span.end_s)};
    any.end_s = std::max(any.end_s, span.end_s);
    if (any.begin_s < 0 || span.begin_s < any.begin_s) any.begin_s = span.begin_s;
  };
  if (shape_.h2d > 0) {
    out.h2d_rate = rate(shape_.h2d, h2d);
    add(h2d);
  }
  if (shape_.d2h > 0) {
    out.d2h_rate = rate(shape_.d2h, d2h);
    add(d2h);
  }
  out.copies_s = any.seconds();
  std::vector<double> products, during_copies;
  for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
    if (graph_.lane(Node{node})->kind != LaneKind::compute) continue;
    const NodeTime& time = timeline_.nodes[node];
    products.push_back(time.end_s - time.begin_s);
    if (time.begin_s >= all.begin_s && time.end_s <= all.end_s) during_copies.push_back(products.back());
  }
  if (!products.empty()) out.product_s = quantile(during_copies.empty() ? products : during_copies, 0.5);
  out.all_at_once = timeline_.makespan_s > 0 ? lanes_at_once(graph_, timeline_).back() / timeline_.makespan_s : 0;
  return out;
}

void CopyRun::check() const {
  const std::vector<std::byte> expected = pattern(shape_.bytes);
  std::vector<std::byte> found(expected.size());
  const auto compare = [&](Buffer buffer) {
    program_->memory().read(buffer, std::span(found));
    const auto at = std::mismatch(found.begin(), found.end(), expected.begin()).first;
    if (at == found.end()) return;
    throw Error(ErrorKind::run,
                str(graph_.describe(buffer), ": byte ", at - found.begin(), " is ", static_cast<int>(*at),
                    " after copies (", static_cast<int>(expected[static_cast<std::size_t>(at - found.begin())]), ")"));
  };
  if (shape_.h2d > 0) compare(device_in_);
  if (shape_.d2h > 0) compare(host_out_);
}

void CopyRun::write_trace(const std::string& path) const {
  stepgraph::write_trace(*runnable_, timeline_, path, {.title = "copies in both directions during products"});
}

}  // namespace stepgraph::bench
