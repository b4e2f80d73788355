#include "engine/run/recorder.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/graph/graph_data.hpp"
#include "engine/run/program/recording.hpp"

namespace stepgraph {

Recorder::Recorder() : recording_(std::make_shared<Recording>()) {}
Recorder::~Recorder() = default;

Timeline Recorder::timeline() const { return recording_->timeline(); }
std::chrono::steady_clock::time_point Recorder::began() const { return recording_->began(); }

bool Recording::Log::grow() noexcept {
  try {
    if (used == chunks.size()) chunks.push_back(std::make_unique_for_overwrite<Event[]>(chunk_size));
  } catch (const std::bad_alloc&) {
    overflowed = true;
    return false;
  }
  next         = chunks[used++].get();
  end_of_chunk = next + chunk_size;
  return true;
}

void Recording::Log::clear() noexcept {
  next = end_of_chunk = nullptr;
  used                = 0;
  overflowed          = false;
}

template <class Visit>
void Recording::Log::for_each(const Visit& visit) const {
  for (std::size_t i = 0; i < used; ++i) {
    const Event* const first = chunks[i].get();
    const Event* const last  = i + 1 < used ? first + chunk_size : next;
    std::for_each(first, last, visit);
  }
}

bool Recording::begin(std::size_t num_workers, std::shared_ptr<const TaskOrder> order) {
  if (busy_.exchange(true)) return false;
  try {
    logs_.resize(num_workers);
  } catch (...) {
    busy_.store(false);
    throw;
  }
  for (Log& log : logs_) log.clear();
  times_.clear();
  order_    = std::move(order);
  recorded_ = true;
  began_    = Moment::now();
  return true;
}

void Recording::end() noexcept {
  ended_ = Moment::now();
  busy_.store(false);
}

void Recording::abandon() noexcept {
  recorded_ = false;
  busy_.store(false);
}

// The speed of the counter is measured over the run itself. A run of a few microseconds is too short for that: then
// this function waits once, until the speed is known to 1 in 10,000.
Moment Recording::ruler_end() const {
  constexpr std::chrono::microseconds enough{500};
  const std::lock_guard lock(mutex_);
  while (ended_.time - began_.time < enough) ended_ = Moment::now();
  return ended_;
}

Timeline Recording::timeline() const {
  if (busy_.load()) throw Error(ErrorKind::config, "recorder: its step is still under way (wait with get() first)");
  if (!recorded_) throw Error(ErrorKind::config, "recorder: nothing was recorded (start a step with it first)");
  if (!times_.empty()) {
    Timeline measured{.nodes = times_};
    for (const NodeTime& time : measured.nodes) measured.makespan_s = std::max(measured.makespan_s, time.end_s);
    return measured;
  }
  const Moment until            = ruler_end();
  const double seconds_per_tick = std::chrono::duration<double>(until.time - began_.time).count() /
                                  static_cast<double>(std::max<std::uint64_t>(1, until.ticks - began_.ticks));
  const auto seconds = [&](std::uint64_t ticks) {
    return ticks > began_.ticks ? static_cast<double>(ticks - began_.ticks) * seconds_per_tick : 0.0;
  };
  Timeline out;
  out.nodes.resize(order_->leader.size());
  for (std::size_t worker = 0; worker < logs_.size(); ++worker) {
    if (logs_[worker].overflowed) throw Error(ErrorKind::backend, "recorder: out of memory while the step ran");
    logs_[worker].for_each([&](const Event& event) {
      NodeTime& time = out.nodes[event.node];
      time           = {seconds(event.begin), seconds(event.end), static_cast<std::int32_t>(worker)};
      time.end_s     = std::max(time.begin_s, time.end_s);
    });
  }
  put_begins_right(out);
  for (std::size_t node = 0; node < out.nodes.size(); ++node) {
    const std::uint32_t leader = order_->leader[node];
    if (leader != node) out.nodes[node] = out.nodes[leader];
    out.makespan_s = std::max(out.makespan_s, out.nodes[node].end_s);
  }
  return out;
}

// Corrects begins that were read too early (read_begin_ticks): a task begins when the tasks before it have ended. An
// end moves only if it lies before the corrected begin; then the tasks after it are checked again.
void Recording::put_begins_right(Timeline& timeline) const {
  for (bool again = true; std::exchange(again, false);) {
    for (const std::uint32_t task : order_->task_nodes) {
      NodeTime& time = timeline.nodes[task];
      if (!time.ran()) continue;
      for (std::uint32_t i = order_->pred_begin[task]; i < order_->pred_begin[task + 1]; ++i)
        time.begin_s = std::max(time.begin_s, timeline.nodes[order_->preds[i]].end_s);
      if (time.begin_s <= time.end_s) continue;
      time.end_s = time.begin_s;
      again      = true;
    }
  }
}

}  // namespace stepgraph
