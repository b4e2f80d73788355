#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/run/device.hpp"
#include "engine/run/streams.hpp"

// A device that executes work as soon as it is enqueued, and a world of ranks on it. Shows what the engine asks of a
// device, and in which order.
namespace stepgraph::testing {

struct EagerMemory final : DeviceMemory {
  [[nodiscard]] std::byte* allocate(Rank, Space, std::size_t size) override {
    ++held;
    return static_cast<std::byte*>(std::calloc(size, 1));
  }
  void release(Rank, Space, std::byte* bytes) noexcept override {
    --held;
    std::free(bytes);
  }
  [[nodiscard]] bool host_sees(Space space) const noexcept override { return space == Space::pinned; }
  void read(const std::byte* from, std::span<std::byte> to) override { std::memcpy(to.data(), from, to.size()); }
  void write(std::byte* to, std::span<const std::byte> from) override { std::memcpy(to, from.data(), from.size()); }
  int held = 0;
};

struct EagerDevice final : Device {
  struct Streams final : DeviceStreams {
    Streams(EagerDevice& device, const Graph& of, StreamPlan streams)
        : owner(device), graph(of), plan(std::move(streams)) {
      owner.last_plan = plan;
    }
    [[nodiscard]] bool replay() override { return false; }
    void begin(bool) override {
      owner.order.clear();
      ++owner.num_runs;
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
    EagerDevice& owner;
    Graph graph;
    StreamPlan plan;
    DeviceQueue queue;
  };
  [[nodiscard]] DeviceMemory& memory() override { return bytes; }
  [[nodiscard]] std::unique_ptr<DeviceStreams> lower(const Graph& graph, StreamPlan plan) override {
    return std::make_unique<Streams>(*this, graph, std::move(plan));
  }
  EagerMemory bytes;
  std::function<bool()> is_done;  // whether the device is done; empty: it is, as soon as all nodes were issued
  std::atomic<int> num_runs{0};
  std::mutex mutex;  // guards the next two
  StreamPlan last_plan;
  std::vector<std::uint32_t> order;  // of the last run, all parts of a communication
  int num_after = 0;
  bool good     = false;
};

class EagerWorld final : public World {
 public:
  explicit EagerWorld(int num_ranks) : loopback_(num_ranks) {}
  [[nodiscard]] int num_ranks() const override { return loopback_.num_ranks(); }
  [[nodiscard]] bool is_local(Rank) const override { return true; }
  [[nodiscard]] bool waits(LaneKind) const override { return false; }
  [[nodiscard]] IssueOrder issue_order() const override { return IssueOrder::any; }
  [[nodiscard]] Device* device() const override { return &eager; }
  void communicate(const Context& context, const Exchange& exchange) override {
    for (const LocalPart& part : exchange.parts) parts_with_queue += part.queue != nullptr;
    loopback_.communicate(context, exchange);
  }
  void abort(std::string_view) noexcept override { ++num_aborts; }

  mutable EagerDevice eager;
  int parts_with_queue = 0;
  std::atomic<int> num_aborts{0};

 private:
  LoopbackWorld loopback_;
};

}  // namespace stepgraph::testing
