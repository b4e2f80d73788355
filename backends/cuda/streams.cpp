#include "backends/cuda/streams.hpp"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>

#include "backends/cuda/check.hpp"

namespace stepgraph::cuda {
namespace {

constexpr std::uint32_t none = StreamPlan::none;

cudaEvent_t make_event(unsigned flags) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, flags), "making an event");
  return event;
}
void drop(cudaEvent_t event) noexcept {
  if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
}

// Begins a range that profilers show. Names are not null-terminated, so the name is copied, into memory that is kept.
void begin_range(std::string_view name) {
  thread_local std::string text;
  text.assign(name);
  nvtxRangePushA(text.c_str());
}

}  // namespace

Streams::Streams(Shared& shared, const Graph& graph, StreamPlan plan)
    : shared_(shared), graph_(graph), plan_(std::move(plan)), queues_(graph.ranks().size() * num_lane_kinds, nullptr) {
  for (auto& events : events_) events.resize(graph.num_nodes(), nullptr);
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const std::uint32_t stream = plan_.stream[node];
    has_host_nodes_            = has_host_nodes_ || stream == none;
    if (stream == none || queues_[stream] != nullptr) continue;
    const Lane lane = plan_.lane_of(stream);
    queues_[stream] = &shared_.queues.of(lane.rank, lane.kind);
  }
  const auto need = [&](std::uint32_t node) {
    const OnDevice here(queue_of(plan_.stream[node]).device());
    for (auto& events : events_) {
      if (events[node] == nullptr) events[node] = make_event(cudaEventDisableTiming);
    }
  };
  for (const std::uint32_t node : plan_.waits) need(node);
  for (const std::uint32_t node : plan_.loop_waits) need(node);
  with_event_.resize(queues_.size());
  for (const std::uint32_t node : plan_.issue_order) {
    if (events_[0][node] != nullptr) with_event_[plan_.stream[node]].push_back(node);
  }
  origin_ = shared_.queues.of(Rank{0}, LaneKind::compute).stream();
  fork_   = make_event(cudaEventDisableTiming);
  tail_   = make_event(cudaEventDisableTiming);
}

// The run of a program that is destroyed is over, so the device is done with it.
Streams::~Streams() {
  if (shared_.queues.abandoned()) return;
  try {
    shared_.queues.synchronize();
  } catch (const Error&) {  // already reported
  }
  {
    const std::lock_guard guard(shared_.last_mutex);
    if (shared_.last == this) shared_.last = nullptr;
  }
  if (graph_exec_ != nullptr) static_cast<void>(cudaGraphExecDestroy(graph_exec_));
  drop_timing();
  drop(fork_);
  drop(tail_);
  for (const auto& events : events_) {
    for (const cudaEvent_t event : events) drop(event);
  }
}

std::string Streams::doing(const char* what, Node node) const {
  const std::uint32_t stream = plan_.stream[node.id];
  return str(what, " ", graph_.describe(node), stream == none ? "" : str(" on stream '", plan_.name(stream), "'"));
}

bool Streams::vacant() {
  const std::unique_lock lock(shared_.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  const std::lock_guard guard(shared_.last_mutex);
  if (shared_.last == nullptr || shared_.last == this || shared_.queues.abandoned()) return true;
  return cudaEventQuery(shared_.last->tail_) != cudaErrorNotReady;
}

// Events do not order streams of another program, or of captured and issued runs.
void Streams::take_turn(bool captured) {
  shared_.queues.check_usable();
  one_launch_ = captured;
  known_.assign(queues_.size(), 0);
  if (shared_.last == this && shared_.last_captured == captured) return;
  shared_.queues.synchronize();
  const std::lock_guard guard(shared_.last_mutex);
  shared_.last          = this;
  shared_.last_captured = captured;
}

bool Streams::replay() {
  if (graph_exec_ == nullptr || !shared_.capture) return false;
  const std::lock_guard lock(shared_.mutex);
  take_turn(true);
  check(cudaGraphLaunch(graph_exec_, origin_), "launching a step");
  finish(true);
  return true;
}

// The first run is issued, not captured: libraries then choose algorithms and load kernels, which cannot be captured.
void Streams::begin(bool recorded) {
  std::unique_lock turn(shared_.mutex);  // released if this throws, because end() is not called then
  recorded_ = recorded;
  if (!recorded && shared_.capture && !has_host_nodes_ && runs_ > 0) {
    take_turn(true);
    joined_.assign(queues_.size(), 0);
    check(cudaStreamBeginCapture(origin_, cudaStreamCaptureModeThreadLocal), "beginning to capture a step");
    capturing_ = true;
    if (const cudaError_t status = cudaEventRecord(fork_, origin_); status != cudaSuccess) {
      end_capture(false);
      check(status, "beginning to capture a step");
    }
  } else {
    take_turn(false);
    if (recorded) begin_timing();
  }
  turn_ = std::move(turn);
}

void Streams::begin_timing() {
  shared_.queues.synchronize();
  if (timing_.empty()) {
    timing_.resize(graph_.num_nodes());
    base_ = make_event(cudaEventDefault);
    for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
      if (plan_.stream[node] == none) continue;
      timing_[node].begin = make_event(cudaEventDefault);
      timing_[node].end   = make_event(cudaEventDefault);
    }
  }
  for (Timing& timing : timing_) timing.issued = false;
  check(cudaEventRecord(base_, origin_), "starting the clock");
  check(cudaEventSynchronize(base_), "starting the clock");
  base_time_ = Clock::now();
}

// A stream joins a capture when it waits for an event of the capture.
void Streams::join_capture(std::uint32_t stream) {
  if (joined_[stream]) return;
  joined_[stream] = 1;
  if (queue_of(stream).stream() == origin_) return;
  check(cudaStreamWaitEvent(queue_of(stream).stream(), fork_, 0), "joining a stream to a capture");
}

bool Streams::ready(Node node) {
  if (plan_.stream[node.id] != none) return true;
  const auto is_done = [&](std::uint32_t other) {
    const cudaError_t status = cudaEventQuery(event(other));
    if (status == cudaErrorNotReady) return false;
    check(status, [&] { return doing("waiting for predecessors of", node); });
    return true;
  };
  return std::ranges::all_of(plan_.waits_of(node), is_done) && std::ranges::all_of(plan_.loop_waits_of(node), is_done);
}

const DeviceQueue* Streams::before(Node node) {
  begin_range(graph_.name(node));
  const std::uint32_t stream = plan_.stream[node.id];
  if (stream == none) {
    if (recorded_) timing_[node.id].host_begin_s = std::chrono::duration<double>(Clock::now() - base_time_).count();
    return nullptr;
  }
  Queue& queue = queue_of(stream);
  check(cudaSetDevice(queue.device()), [&] { return doing("choosing the device of", node); });
  if (capturing_) join_capture(stream);
  for (const std::uint32_t other : plan_.waits_of(node))
    check(cudaStreamWaitEvent(queue.stream(), event(other), 0),
          [&] { return doing("waiting for predecessors of", node); });
  if (!capturing_) {
    for (const std::uint32_t other : plan_.loop_waits_of(node))
      check(cudaStreamWaitEvent(queue.stream(), event(other), 0),
            [&] { return doing("waiting for predecessors of", node); });
  }
  if (recorded_) check(cudaEventRecord(timing_[node.id].begin, queue.stream()), [&] { return doing("timing", node); });
  return &queue.handles();
}

void Streams::after(Node node) {
  nvtxRangePop();
  const std::uint32_t stream = plan_.stream[node.id];
  if (stream == none) {
    if (recorded_) {
      timing_[node.id].host_end_s = std::chrono::duration<double>(Clock::now() - base_time_).count();
      timing_[node.id].issued     = true;
    }
    return;
  }
  const cudaStream_t on = queue_of(stream).stream();
  if (recorded_) {
    check(cudaEventRecord(timing_[node.id].end, on), [&] { return doing("timing", node); });
    timing_[node.id].issued = true;
  }
  if (const cudaEvent_t waited_for = event(node.id); waited_for != nullptr)
    check(cudaEventRecord(waited_for, on), [&] { return doing("recording an event after", node); });
  if (shared_.check_nodes && !capturing_) check(cudaStreamSynchronize(on), [&] { return doing("running", node); });
}

std::vector<NodeTime> Streams::times() {
  if (!recorded_) return {};
  shared_.queues.synchronize();
  std::vector<NodeTime> times(graph_.num_nodes());
  for (std::uint32_t node = 0; node < graph_.num_nodes(); ++node) {
    const Timing& timing = timing_[node];
    if (!timing.issued) continue;  // its times are those of an earlier run, if any
    if (timing.begin == nullptr) {
      times[node] = {.begin_s = timing.host_begin_s, .end_s = timing.host_end_s};
      continue;
    }
    const auto since = [&](cudaEvent_t event) -> double {
      float ms = -1000;
      if (cudaEventElapsedTime(&ms, base_, event) != cudaSuccess) static_cast<void>(cudaGetLastError());
      return static_cast<double>(ms) / 1000;
    };
    times[node].begin_s = since(timing.begin);
    times[node].end_s   = since(timing.end);
  }
  return times;
}

void Streams::drop_timing() noexcept {
  for (const Timing& timing : timing_) {
    drop(timing.begin);
    drop(timing.end);
  }
  drop(base_);
}

// The origin stream continues when every stream has reached this point.
void Streams::join_all() {
  for (std::uint32_t stream = 0; stream < queues_.size(); ++stream) {
    if (queues_[stream] == nullptr || queue_of(stream).stream() == origin_) continue;
    if (capturing_ && !joined_[stream]) continue;
    const cudaEvent_t reached = queue_of(stream).reached();
    check(cudaEventRecord(reached, queue_of(stream).stream()), "joining streams at the end of a step");
    check(cudaStreamWaitEvent(origin_, reached, 0), "joining streams at the end of a step");
  }
}

// A failed run does not count: libraries may not have seen all nodes.
void Streams::finish(bool good) {
  runs_ += good ? 1 : 0;
  check(cudaEventRecord(tail_, origin_), "recording the end of a step");
}

void Streams::end(bool good) {
  const std::unique_lock<std::mutex> turn = std::move(turn_);
  if (capturing_) {
    end_capture(good);
    if (!good) return;
    check(cudaGraphLaunch(graph_exec_, origin_), "launching a step");
  } else {
    join_all();
  }
  finish(good);
}

void Streams::end_capture(bool good) {
  if (good) join_all();
  capturing_               = false;
  cudaGraph_t captured     = nullptr;
  const cudaError_t status = cudaStreamEndCapture(origin_, &captured);
  if (!good) {  // nothing of the capture has run
    if (captured != nullptr) static_cast<void>(cudaGraphDestroy(captured));
    static_cast<void>(cudaGetLastError());
    return;
  }
  check(status, "capturing a step");
  const cudaError_t made = cudaGraphInstantiate(&graph_exec_, captured, 0);
  static_cast<void>(cudaGraphDestroy(captured));
  check(made, "making a CUDA graph of a step");
}

bool Streams::done() {
  const cudaError_t status = cudaEventQuery(tail_);
  if (status == cudaErrorNotReady) return false;
  check(status, "running a step (CudaWorldOptions::check_nodes names the node)");
  return true;
}

// Only nodes with an event are counted. An event that was not recorded in this run may be that of the run before, so
// this is asked only when all nodes were issued.
std::optional<std::uint64_t> Streams::num_done() {
  if (one_launch_) return std::nullopt;
  std::uint64_t num = 0;
  for (std::size_t stream = 0; stream < known_.size(); ++stream) {
    const std::vector<std::uint32_t>& nodes = with_event_[stream];
    std::size_t& at                         = known_[stream];
    while (at < nodes.size() && cudaEventQuery(events_[0][nodes[at]]) == cudaSuccess) ++at;
    num += at;
  }
  return num;
}

std::vector<Lane> Streams::unfinished() {
  std::vector<Lane> lanes;
  for (std::uint32_t stream = 0; stream < queues_.size() && !one_launch_; ++stream) {
    if (queues_[stream] != nullptr && cudaStreamQuery(queue_of(stream).stream()) == cudaErrorNotReady)
      lanes.push_back(plan_.lane_of(stream));
  }
  return lanes;
}

void Streams::abandon(std::shared_ptr<void> program) noexcept {
  shared_.queues.abandon();
  shared_.kept.push_back(std::move(program));
  shared_.kept.push_back(shared_.owner());
}

}  // namespace stepgraph::cuda
