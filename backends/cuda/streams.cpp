#include "backends/cuda/streams.hpp"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>

#include "backends/cuda/check.hpp"

namespace stepgraph::cuda {
namespace {

constexpr std::uint32_t none = StreamPlan::none;

// Begins a range that profilers show. Names are not null-terminated, so the name is copied, into memory that is kept.
void begin_range(std::string_view name) {
  thread_local std::string text;
  text.assign(name);
  nvtxRangePushA(text.c_str());
}

}  // namespace

Streams::Streams(Shared& shared, const Graph& graph, StreamPlan plan, bool captures)
    : shared_(shared),
      graph_(graph),
      plan_(std::move(plan)),
      captures_(captures),
      queues_(graph.ranks().size() * num_lane_kinds, nullptr) {
  try {
    use_queues();
    const OnDevice here(origin_device_);
    give_workspaces();
    make_events();
    if (!plan_.host_waits.empty() && HostFlags::supported(origin_device_))
      host_flags_ = std::make_unique<HostFlags>(graph_, plan_, shared_.queues.heap());
    if (shared_.markers) marks_ = std::make_unique<Marks>(graph_, plan_, shared_.queues.heap());
    const std::lock_guard guard(shared_.last_mutex);
    shared_.programs.push_back(this);
  } catch (...) {
    free_all();
    throw;
  }
}

void Streams::use_queues() {
  for (const std::uint32_t stream : plan_.stream) {
    if (stream == none || queues_[stream] != nullptr) continue;
    const Lane lane = plan_.lane_of(stream);
    queues_[stream] = &shared_.queues.of(lane.rank, lane.kind);
  }
  const Queue& first = shared_.queues.of(shared_.queues.ranks()[0], LaneKind::compute);
  origin_            = first.stream();
  origin_device_     = first.device();
}

// A node gets exactly the workspace that it needs: libraries choose algorithms by its size.
void Streams::give_workspaces() {
  handles_.resize(queues_.size());
  workspaces_.resize(queues_.size());
  for (std::uint32_t stream = 0; stream < queues_.size(); ++stream) {
    if (queues_[stream] == nullptr) continue;
    handles_[stream] = queue_of(stream).handles();
    if (const auto size = static_cast<std::size_t>(plan_.workspace_of(stream)); size > 0)
      workspaces_[stream] = queue_of(stream).workspace(size, str("the workspace of ", plan_.name(stream)));
  }
  handle_of_ = plan_.stream;
  for (const NodeWorkspace& of : plan_.node_workspaces) {
    const std::uint32_t stream = plan_.stream[of.node.id];
    handle_of_[of.node.id]     = static_cast<std::uint32_t>(handles_.size());
    handles_.push_back(queue_of(stream).handles());
    handles_.back().workspace = workspaces_[stream]->bytes().subspan(static_cast<std::size_t>(of.offset_bytes),
                                                                     static_cast<std::size_t>(of.size_bytes));
  }
}

void Streams::make_events() {
  for (auto& events : events_) events.resize(graph_.num_nodes(), nullptr);
  const auto need = [&](std::uint32_t node) {
    for (auto& events : events_) {
      if (events[node] == nullptr)
        events[node] = make_event(queue_of(plan_.stream[node]).device(), cudaEventDisableTiming);
    }
  };
  for (const std::uint32_t node : plan_.waits) need(node);
  for (const std::uint32_t node : plan_.loop_waits) need(node);
  with_event_.resize(queues_.size());
  for (const std::uint32_t node : plan_.issue_order) {
    if (events_[0][node] != nullptr) with_event_[plan_.stream[node]].push_back(node);
  }
  fork_ = make_event(origin_device_, cudaEventDisableTiming);
  tail_ = make_event(origin_device_, cudaEventDisableTiming);
}

void Streams::free_all() noexcept {
  drop_capture();
  timing_.reset();
  drop(fork_);
  drop(tail_);
  for (const auto& events : events_) {
    for (const cudaEvent_t event : events) drop(event);
  }
}

// The run of a program that is destroyed is over, so the device is done with it.
Streams::~Streams() {
  {
    const std::lock_guard guard(shared_.last_mutex);
    if (shared_.last == this) shared_.last = nullptr;
    std::erase(shared_.programs, this);
  }
  if (shared_.queues.abandoned()) {
    static_cast<void>(timing_.release());  // the device may still use its events
    return;
  }
  try {
    const OnDevice here(origin_device_);
    try {
      shared_.queues.synchronize();
    } catch (const Error&) {  // already reported
    }
    free_all();
  } catch (const Error&) {  // the device has failed: nothing can be freed
  }
}

void Streams::drop_capture() noexcept {
  if (graph_exec_ != nullptr) static_cast<void>(cudaGraphExecDestroy(graph_exec_));
  graph_exec_ = nullptr;
  runs_       = 0;
}

std::string Streams::doing(const char* what, Node node) const {
  const std::uint32_t stream = plan_.stream[node.id];
  return str(what, " ", graph_.describe(node), stream == none ? "" : str(" on stream '", plan_.name(stream), "'"));
}

bool Streams::vacant() {
  const OnDevice here(origin_device_);
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
  if (shared_.last != this || shared_.last_captured != captured) {
    shared_.queues.synchronize();
    const std::lock_guard guard(shared_.last_mutex);
    shared_.last          = this;
    shared_.last_captured = captured;
  }
  if (marks_) marks_->reset();
  shared_.queues.set_busy();
}

bool Streams::replay() {
  if (graph_exec_ == nullptr || !shared_.capture) return false;
  const OnDevice here(origin_device_);
  const std::lock_guard lock(shared_.mutex);
  take_turn(true);
  check(cudaGraphLaunch(graph_exec_, origin_), "launching a step");
  finish(true);
  return true;
}

// The first run is issued, not captured: libraries then choose algorithms and load kernels, which cannot be captured.
void Streams::begin(bool recorded) {
  const OnDevice here(origin_device_);
  std::unique_lock turn(shared_.mutex);  // released if this throws, because end() is not called then
  recorded_ = recorded;
  if (host_flags_) host_flags_->begin();
  if (!recorded && shared_.capture && captures_ && runs_ > 0) {
    take_turn(true);
    joined_.assign(queues_.size(), 0);
    std::unique_lock no_waiting(shared_.queues.capture_mutex());
    // Only calls of this thread are restricted while it captures: other threads may make and run programs.
    check(cudaStreamBeginCapture(origin_, cudaStreamCaptureModeThreadLocal), "beginning to capture a step");
    no_waiting_ = std::move(no_waiting);
    capturing_  = true;
    if (const cudaError_t status = cudaEventRecord(fork_, origin_); status != cudaSuccess) {
      end_capture(false);
      check(status, "beginning to capture a step");
    }
  } else {
    take_turn(false);
    if (recorded) {
      shared_.queues.synchronize();
      if (!timing_) timing_ = std::make_unique<NodeTiming>(plan_, queues_);
      timing_->begin();
      shared_.queues.set_busy();
    }
  }
  turn_ = std::move(turn);
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
  const OnDevice here(origin_device_);
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
    if (recorded_) timing_->before_host(node.id);
    return nullptr;
  }
  Queue& queue = queue_of(stream);
  queue.make_current();
  if (capturing_) join_capture(stream);
  for (const std::uint32_t other : plan_.waits_of(node))
    check(cudaStreamWaitEvent(queue.stream(), event(other), 0),
          [&] { return doing("waiting for predecessors of", node); });
  if (!capturing_) {
    for (const std::uint32_t other : plan_.loop_waits_of(node))
      check(cudaStreamWaitEvent(queue.stream(), event(other), 0),
            [&] { return doing("waiting for predecessors of", node); });
  }
  if (host_flags_) {
    for (const std::uint32_t host : plan_.host_waits_of(node)) {
      // First for the nodes that feed the host node, by events: then the device never holds them up behind the flag.
      for (const std::uint32_t other : plan_.waits_of(Node{host}))
        check(cudaStreamWaitEvent(queue.stream(), event(other), 0),
              [&] { return doing("waiting for predecessors of", node); });
      host_flags_->wait(queue.stream(), host);
    }
  }
  if (marks_) marks_->before(node.id, queue.stream());
  if (recorded_) check(timing_->before(node.id, queue.stream()), [&] { return doing("timing", node); });
  return &handles_[handle_of_[node.id]];
}

void Streams::after(Node node) {
  nvtxRangePop();
  const std::uint32_t stream = plan_.stream[node.id];
  if (stream == none) {
    if (recorded_) timing_->after_host(node.id);
    if (host_flags_) host_flags_->set_done(node.id);
    return;
  }
  const cudaStream_t on = queue_of(stream).stream();
  if (recorded_) check(timing_->after(node.id, on), [&] { return doing("timing", node); });
  if (marks_) marks_->after(node.id, on);
  if (const cudaEvent_t waited_for = event(node.id); waited_for != nullptr)
    check(cudaEventRecord(waited_for, on), [&] { return doing("recording an event after", node); });
  if (shared_.check_nodes && !capturing_) check(cudaStreamSynchronize(on), [&] { return doing("running", node); });
}

std::vector<NodeTime> Streams::times() {
  if (!recorded_) return {};
  const OnDevice here(origin_device_);
  shared_.queues.synchronize();
  return timing_->times();
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
  shared_.queues.set_busy();
  check(cudaEventRecord(tail_, origin_), "recording the end of a step");
}

void Streams::end(bool good) {
  const std::unique_lock<std::mutex> turn = std::move(turn_);
  if (host_flags_) host_flags_->release();
  const OnDevice here(origin_device_);
  if (capturing_) {
    try {
      if (good) join_all();
    } catch (...) {
      end_capture(false);
      throw;
    }
    end_capture(good);
    if (!good) return;
    check(cudaGraphLaunch(graph_exec_, origin_), "launching a step");
  } else {
    join_all();
  }
  finish(good);
}

void Streams::end_capture(bool good) {
  capturing_               = false;
  cudaGraph_t captured     = nullptr;
  const cudaError_t status = cudaStreamEndCapture(origin_, &captured);
  no_waiting_              = {};
  if (!good) {  // nothing of the capture has run
    if (captured != nullptr) static_cast<void>(cudaGraphDestroy(captured));
    static_cast<void>(cudaGetLastError());
    return;
  }
  check(status, "capturing a step");
  // Nodes keep the priorities of their streams.
  const cudaError_t made = cudaGraphInstantiate(&graph_exec_, captured, cudaGraphInstantiateFlagUseNodePriority);
  static_cast<void>(cudaGraphDestroy(captured));
  check(made, "making a CUDA graph of a step");
}

bool Streams::done() {
  const OnDevice here(origin_device_);
  const cudaError_t status = cudaEventQuery(tail_);
  if (status == cudaErrorNotReady) return false;
  check(status, "running a step (CudaWorldOptions::check_nodes names the node)");
  return true;
}

// Only nodes with an event are counted. An event that was not recorded in this run may be that of the run before, so
// this is asked only when all nodes were issued.
std::optional<std::uint64_t> Streams::num_done() {
  if (marks_) return marks_->progress().num_done;
  if (one_launch_) return std::nullopt;
  const OnDevice here(origin_device_);
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
  const OnDevice here(origin_device_);
  std::vector<Lane> lanes;
  for (std::uint32_t stream = 0; stream < queues_.size(); ++stream) {
    if (queues_[stream] == nullptr) continue;
    const bool busy = one_launch_ ? marks_ && marks_->is_busy(stream)
                                  : cudaStreamQuery(queue_of(stream).stream()) == cudaErrorNotReady;
    if (busy) lanes.push_back(plan_.lane_of(stream));
  }
  return lanes;
}

std::optional<DeviceProgress> Streams::progress() const {
  return marks_ ? std::optional(marks_->progress()) : std::nullopt;
}
void Streams::abandon(std::shared_ptr<void> program) noexcept {
  shared_.queues.abandon();
  shared_.kept.push_back(std::move(program));
  shared_.kept.push_back(shared_.owner());
}

}  // namespace stepgraph::cuda
