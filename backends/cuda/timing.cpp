#include "backends/cuda/timing.hpp"

#include <algorithm>

#include "backends/cuda/check.hpp"

namespace stepgraph::cuda {

cudaEvent_t make_event(int device, unsigned flags) {
  const OnDevice here(device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, flags), "making an event");
  return event;
}

void drop(cudaEvent_t event) noexcept {
  if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
}

NodeTiming::NodeTiming(const StreamPlan& plan, std::span<Queue* const> queues) : timing_(plan.stream.size()) {
  try {
    make(plan, queues);
  } catch (...) {
    drop_all();
    throw;
  }
}
NodeTiming::~NodeTiming() { drop_all(); }

void NodeTiming::make(const StreamPlan& plan, std::span<Queue* const> queues) {
  for (const Queue* const queue : queues) {
    if (queue == nullptr ||
        std::ranges::any_of(bases_, [&](const Base& base) { return base.device == queue->device(); }))
      continue;
    bases_.push_back({queue->device(), queue->stream(), make_event(queue->device(), cudaEventDefault)});
  }
  for (std::uint32_t node = 0; node < timing_.size(); ++node) {
    if (plan.stream[node] == StreamPlan::none) continue;
    Timing& timing   = timing_[node];
    const int device = queues[plan.stream[node]]->device();
    timing.base      = static_cast<std::size_t>(
        std::ranges::find_if(bases_, [&](const Base& base) { return base.device == device; }) - bases_.begin());
    timing.begin = make_event(device, cudaEventDefault);
    timing.end   = make_event(device, cudaEventDefault);
  }
}

void NodeTiming::drop_all() noexcept {
  for (const Timing& timing : timing_) {
    drop(timing.begin);
    drop(timing.end);
  }
  for (const Base& base : bases_) drop(base.event);
}

void NodeTiming::begin() {
  for (Timing& timing : timing_) timing.issued = false;
  start_ = Clock::now();
  for (Base& base : bases_) {
    check(cudaEventRecord(base.event, base.stream), "starting the clock");
    check(cudaEventSynchronize(base.event), "starting the clock");
    if (&base == &bases_.front()) start_ = Clock::now();
    base.since_s = host_s();
  }
  if (!bases_.empty()) bases_.front().since_s = 0;
}

double NodeTiming::host_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

cudaError_t NodeTiming::before(std::uint32_t node, cudaStream_t stream) {
  return cudaEventRecord(timing_[node].begin, stream);
}
cudaError_t NodeTiming::after(std::uint32_t node, cudaStream_t stream) {
  const cudaError_t status = cudaEventRecord(timing_[node].end, stream);
  timing_[node].issued     = status == cudaSuccess;
  return status;
}
void NodeTiming::before_host(std::uint32_t node) { timing_[node].host_begin_s = host_s(); }
void NodeTiming::after_host(std::uint32_t node) {
  timing_[node].host_end_s = host_s();
  timing_[node].issued     = true;
}

std::vector<NodeTime> NodeTiming::times() const {
  std::vector<NodeTime> times(timing_.size());
  for (std::size_t node = 0; node < timing_.size(); ++node) {
    const Timing& timing = timing_[node];
    if (!timing.issued) continue;  // its times are those of an earlier run, if any
    if (timing.begin == nullptr) {
      times[node] = {.begin_s = timing.host_begin_s, .end_s = timing.host_end_s};
      continue;
    }
    const Base& base = bases_[timing.base];
    const auto since = [&](cudaEvent_t event) -> double {
      float ms = 0;
      if (cudaEventElapsedTime(&ms, base.event, event) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return -1;
      }
      return base.since_s + static_cast<double>(ms) / 1000;
    };
    times[node].begin_s = since(timing.begin);
    times[node].end_s   = since(timing.end);
  }
  return times;
}

}  // namespace stepgraph::cuda
