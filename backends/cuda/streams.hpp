#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/cuda/queues.hpp"
#include "engine/run/device.hpp"
#include "engine/run/streams.hpp"

namespace stepgraph::cuda {

class Streams;

// State shared by all programs of a world.
struct Shared {
  Shared(Queues& all, bool captures, bool checks) : queues(all), capture(captures), check_nodes(checks) {}
  Queues& queues;
  bool capture, check_nodes;
  // The last program that ran, and whether it was captured. Events do not order the streams of different programs, so
  // take_turn() synchronizes when either changes.
  Streams* last      = nullptr;
  bool last_captured = false;
  std::mutex mutex;       // held while a run is issued
  std::mutex last_mutex;  // guards `last`; locked after `mutex`

  // After a step that the device has not finished: programs whose memory it may still use, and the owner of this
  // object. They refer to each other, so nothing of this is ever freed.
  std::function<std::shared_ptr<void>()> owner;
  std::vector<std::shared_ptr<void>> kept;
};

// A graph's nodes on the streams of their lanes. An event is recorded after each node that another stream waits for.
// One event per node also serves the next run: a node that waits for a node of the previous run comes before that
// node's next execution.
class Streams final : public DeviceStreams {
 public:
  Streams(Shared& shared, const Graph& graph, StreamPlan plan);
  ~Streams() override;
  Streams(const Streams&)            = delete;
  Streams& operator=(const Streams&) = delete;

  [[nodiscard]] bool vacant() override;
  [[nodiscard]] bool replay() override;
  void begin(bool recorded) override;
  [[nodiscard]] bool ready(Node node) override;
  [[nodiscard]] const DeviceQueue* before(Node node) override;
  void after(Node node) override;
  void end(bool good) override;
  [[nodiscard]] bool done() override;
  [[nodiscard]] std::vector<NodeTime> times() override;
  [[nodiscard]] std::optional<std::uint64_t> num_done() override;
  [[nodiscard]] std::vector<Lane> unfinished() override;
  void abandon(std::shared_ptr<void> program) noexcept override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Timing {
    cudaEvent_t begin = nullptr, end = nullptr;
    double host_begin_s = -1, host_end_s = -1;  // for host nodes
    bool issued = false;                        // in this run; else a failure came before the node
  };

  void take_turn(bool captured);
  void begin_timing();
  void join_capture(std::uint32_t stream);
  void end_capture(bool good);
  void join_all();
  void finish(bool good);
  [[nodiscard]] cudaEvent_t event(std::uint32_t node) const { return events_[capturing_ ? 1 : 0][node]; }
  [[nodiscard]] Queue& queue_of(std::uint32_t stream) const { return *queues_[stream]; }
  [[nodiscard]] std::string doing(const char* what, Node node) const;
  void drop_timing() noexcept;

  Shared& shared_;
  Graph graph_;
  StreamPlan plan_;
  std::vector<Queue*> queues_;          // by stream; null: it has no nodes
  std::vector<cudaEvent_t> events_[2];  // by node, for issued and for captured runs; null: no stream waits
  bool has_host_nodes_ = false;
  std::int64_t runs_   = 0;
  cudaEvent_t tail_    = nullptr;      // recorded at the end of a run
  std::unique_lock<std::mutex> turn_;  // held while this program issues a run

  bool recorded_ = false;
  std::vector<Timing> timing_;  // by node
  cudaEvent_t base_ = nullptr;
  Clock::time_point base_time_;

  // How far the events of a run are known to have come, by stream: places in `with_event_`.
  std::vector<std::vector<std::uint32_t>> with_event_;  // by stream: nodes that have an event, in issue order
  std::vector<std::size_t> known_;
  bool one_launch_ = false;  // the run is one CUDA graph

  bool capturing_ = false;
  std::vector<char> joined_;  // by stream: it has joined the capture
  cudaStream_t origin_        = nullptr;
  cudaEvent_t fork_           = nullptr;
  cudaGraphExec_t graph_exec_ = nullptr;
};

}  // namespace stepgraph::cuda
