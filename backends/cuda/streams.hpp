#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/cuda/host_flags.hpp"
#include "backends/cuda/marks.hpp"
#include "backends/cuda/queues.hpp"
#include "backends/cuda/timing.hpp"
#include "engine/run/device.hpp"
#include "engine/run/streams.hpp"

namespace stepgraph::cuda {

class Streams;

// State shared by all programs of a Ranks.
struct Shared {
  Shared(Queues& all, bool captures, bool checks, bool marks)
      : queues(all), capture(captures), check_nodes(checks), markers(marks) {}
  Queues& queues;
  bool capture, check_nodes, markers;
  // The last program that ran, and whether it was captured. Events do not order the streams of different programs, so
  // take_turn() synchronizes when either changes.
  Streams* last      = nullptr;
  bool last_captured = false;
  std::vector<Streams*> programs;  // all that exist
  std::mutex mutex;                // held while a run is issued
  std::mutex last_mutex;           // guards `last` and `programs`; locked after `mutex`

  // After a step that the device has not finished: programs whose memory it may still use, and the owner of this
  // object. They refer to each other, so nothing of this is ever freed.
  std::function<std::shared_ptr<void>()> owner;
  std::vector<std::shared_ptr<void>> kept;
};

// A graph's nodes on the streams of their lanes. An event is recorded after each node that another stream waits for.
// One event per node also serves the next run: a node that waits for a node of the previous run comes before that
// node's next execution. Streams, events and workspaces are on the device of their rank; a capture begins on the
// compute stream of the first rank, and streams of other devices join it.
class Streams final : public DeviceStreams {
 public:
  // `captures`: whether its runs may be captured; all processes have agreed on it.
  Streams(Shared& shared, const Graph& graph, StreamPlan plan, bool captures);
  ~Streams() override;
  Streams(const Streams&)            = delete;
  Streams& operator=(const Streams&) = delete;

  [[nodiscard]] bool vacant() override;
  [[nodiscard]] bool replay() override;
  void begin(bool recorded) override;
  [[nodiscard]] bool ready(Node node) override;
  [[nodiscard]] bool waits_for_host() const noexcept override { return host_flags_ != nullptr; }
  void stop_waiting() noexcept override {
    if (host_flags_) host_flags_->release();
  }
  [[nodiscard]] const DeviceQueue* before(Node node) override;
  void after(Node node) override;
  void end(bool good) override;
  [[nodiscard]] bool done() override;
  [[nodiscard]] std::vector<NodeTime> times() override;
  [[nodiscard]] std::optional<std::uint64_t> num_done() override;
  [[nodiscard]] std::vector<Lane> unfinished() override;
  [[nodiscard]] std::optional<DeviceProgress> progress() const;  // none: without markers
  void abandon(std::shared_ptr<void> program) noexcept override;

  void drop_capture() noexcept;  // begins again with an issued run; the device is idle
  [[nodiscard]] cudaGraphExec_t captured() const noexcept { return graph_exec_; }  // null: no run was captured yet

 private:
  void use_queues();
  void give_workspaces();
  void make_events();
  void free_all() noexcept;
  void take_turn(bool captured);
  void join_capture(std::uint32_t stream);
  void end_capture(bool good);
  void join_all();
  void finish(bool good);
  [[nodiscard]] cudaEvent_t event(std::uint32_t node) const { return events_[capturing_ ? 1 : 0][node]; }
  [[nodiscard]] Queue& queue_of(std::uint32_t stream) const { return *queues_[stream]; }
  [[nodiscard]] std::string doing(const char* what, Node node) const;

  Shared& shared_;
  Graph graph_;
  StreamPlan plan_;
  bool captures_;
  std::vector<Queue*> queues_;                                // by stream; null: it has no nodes
  std::vector<std::shared_ptr<const Workspace>> workspaces_;  // of the streams
  std::vector<DeviceQueue> handles_;                          // by stream, then those of nodes with their own workspace
  std::vector<std::uint32_t> handle_of_;                      // by node
  std::vector<cudaEvent_t> events_[2];  // by node, for issued and for captured runs; null: no stream waits
  std::int64_t runs_ = 0;
  cudaEvent_t tail_  = nullptr;        // recorded at the end of a run
  std::unique_lock<std::mutex> turn_;  // held while this program issues a run

  bool recorded_ = false;
  std::unique_ptr<NodeTiming> timing_;     // null: no run was recorded yet
  std::unique_ptr<Marks> marks_;           // null: without
  std::unique_ptr<HostFlags> host_flags_;  // null: no node follows a host lane's, or the device cannot wait for one

  // How far the events of a run are known to have come, by stream: places in `with_event_`.
  std::vector<std::vector<std::uint32_t>> with_event_;  // by stream: nodes that have an event, in issue order
  std::vector<std::size_t> known_;
  bool one_launch_ = false;  // the run is one CUDA graph

  bool capturing_ = false;
  std::unique_lock<std::recursive_mutex> no_waiting_;  // held while capturing: no thread waits for the streams
  std::vector<char> joined_;                           // by stream: it has joined the capture
  int origin_device_          = 0;
  cudaStream_t origin_        = nullptr;  // where captures begin and graphs are launched
  cudaEvent_t fork_           = nullptr;
  cudaGraphExec_t graph_exec_ = nullptr;
};

}  // namespace stepgraph::cuda
