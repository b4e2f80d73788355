#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/device.hpp"
#include "engine/run/streams.hpp"

// A device that executes work as soon as it is enqueued, and a world of ranks on it. Shows what the engine asks of a
// device, and in which order.
namespace stepgraph::testing {

struct EagerMemory final : DeviceMemory {
  [[nodiscard]] std::byte* allocate(Rank, Space, std::size_t size) override {
    check_usable();
    ++held;
    return static_cast<std::byte*>(std::calloc(size, 1));
  }
  void release(Rank, Space, std::byte* bytes) noexcept override {
    --held;
    std::free(bytes);
  }
  [[nodiscard]] bool host_sees(Space space) const noexcept override { return space == Space::pinned; }
  void read(const std::byte* from, std::span<std::byte> to) override {
    check_usable();
    std::memcpy(to.data(), from, to.size());
  }
  void write(std::byte* to, std::span<const std::byte> from) override {
    check_usable();
    std::memcpy(to, from.data(), from.size());
  }
  void check_usable() const {
    if (abandoned) throw Error(ErrorKind::backend, "eager: the device was abandoned");
  }
  std::atomic<int> held{0};
  std::atomic<bool> abandoned{false};
};

struct EagerDevice final : Device, std::enable_shared_from_this<EagerDevice> {
  struct Streams final : DeviceStreams {
    Streams(EagerDevice& device, const Graph& of, StreamPlan streams)
        : owner(device), graph(of), plan(std::move(streams)) {
      owner.last_plan = plan;
    }
    [[nodiscard]] bool vacant() override { return !owner.is_vacant || owner.is_vacant(); }
    [[nodiscard]] bool replay() override { return false; }
    void begin(bool) override {
      owner.bytes.check_usable();
      owner.order.clear();
      ++owner.num_runs;
    }
    [[nodiscard]] bool ready(Node node) override {
      return plan.stream[node.id] != StreamPlan::none || !owner.is_ready || owner.is_ready(node);
    }
    [[nodiscard]] const DeviceQueue* before(Node node) override {
      const std::lock_guard lock(owner.mutex);
      owner.order.push_back(node.id);
      return plan.stream[node.id] == StreamPlan::none ? nullptr : &queue;
    }
    void after(Node) override {
      const std::lock_guard lock(owner.mutex);
      ++owner.num_after;
    }
    void end(bool good) override { owner.good = good; }
    [[nodiscard]] bool done() override { return !owner.is_done || owner.is_done(); }
    [[nodiscard]] std::vector<NodeTime> times() override {
      return std::vector<NodeTime>(graph.num_nodes(), NodeTime{.begin_s = 1, .end_s = 2});
    }
    [[nodiscard]] std::optional<std::uint64_t> num_done() override {
      return owner.count ? owner.count() : std::nullopt;
    }
    // All lanes with nodes.
    [[nodiscard]] std::vector<Lane> unfinished() override {
      if (owner.unfinished_fails) throw Error(ErrorKind::backend, "eager: the device has failed");
      std::vector<Lane> lanes;
      for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
        if (plan.stream[node] == StreamPlan::none) continue;
        const Lane lane = plan.lane_of(plan.stream[node]);
        if (std::find(lanes.begin(), lanes.end(), lane) == lanes.end()) lanes.push_back(lane);
      }
      return lanes;
    }
    void abandon(std::shared_ptr<void> program) noexcept override {
      owner.bytes.abandoned = true;
      owner.kept.push_back(std::move(program));
      owner.self = owner.shared_from_this();
    }
    EagerDevice& owner;
    Graph graph;
    StreamPlan plan;
    DeviceQueue queue;
  };
  [[nodiscard]] DeviceMemory& memory() override { return bytes; }
  [[nodiscard]] std::unique_ptr<DeviceStreams> lower(const Graph& graph, StreamPlan plan) override {
    bytes.check_usable();
    return std::make_unique<Streams>(*this, graph, std::move(plan));
  }
  // Ends what an abandoned device keeps for ever, for tests that look for leaks. The device may end with this call.
  void forget() {
    const std::shared_ptr<EagerDevice> last = std::move(self);
    kept.clear();
  }

  EagerMemory bytes;
  std::function<bool()> is_done;       // whether the device is done; empty: it is, as soon as all nodes were issued
  std::function<bool()> is_vacant;     // empty: always
  std::function<bool(Node)> is_ready;  // of host nodes; empty: always
  std::function<std::optional<std::uint64_t>()> count;  // of nodes that are done; empty: it cannot tell
  std::vector<std::shared_ptr<void>> kept;              // after abandon()
  std::shared_ptr<EagerDevice> self;                    // likewise
  std::atomic<int> num_runs{0};
  std::mutex mutex;  // guards the next two
  StreamPlan last_plan;
  std::vector<std::uint32_t> order;  // of the last run, all parts of a communication
  int num_after         = 0;
  bool good             = false;
  bool unfinished_fails = false;
};

class EagerWorld final : public World {
 public:
  explicit EagerWorld(int num_ranks) : loopback_(num_ranks) {}
  [[nodiscard]] int num_ranks() const override { return loopback_.num_ranks(); }
  [[nodiscard]] bool waits(LaneKind) const override { return false; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  [[nodiscard]] Device* device() const override { return &eager; }
  [[nodiscard]] std::shared_ptr<EagerDevice> shared_device() const { return device_; }
  void communicate(const Context& context, const Exchange& exchange) override {
    for (const LocalPart& part : exchange.parts) parts_with_queue += part.queue != nullptr;
    loopback_.communicate(context, exchange);
  }
  void abort(std::string_view) noexcept override { ++num_aborts; }
  [[nodiscard]] std::int64_t part_workspace(const Graph& graph, Node part) const override {
    return part_bytes ? part_bytes(graph, part) : 0;
  }

  void end_step() noexcept override { ++num_ends; }

 private:
  std::shared_ptr<EagerDevice> device_ = std::make_shared<EagerDevice>();
  LoopbackWorld loopback_;

 public:
  EagerDevice& eager   = *device_;
  int parts_with_queue = 0;
  std::function<std::int64_t(const Graph&, Node)> part_bytes;  // part_workspace; empty: 0
  std::atomic<int> num_aborts{0}, num_ends{0};
};

}  // namespace stepgraph::testing
