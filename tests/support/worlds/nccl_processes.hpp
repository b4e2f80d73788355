#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/streams.hpp"
#include "tests/backends/process/processes.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/worlds/eager_world.hpp"
#include "tests/support/worlds/emulated_nccl.hpp"

// Worlds of NCCL whose processes are threads, on devices that execute work as soon as it is enqueued.
namespace stepgraph::testing {

// The device of one process. Each part has exactly the workspace that it needs, with other bytes in it every time. It
// is an error to write beyond it.
class WorkspaceDevice final : public Device {
 public:
  explicit WorkspaceDevice(nccl::CallOptions calls, std::function<bool(bool)> may_capture)
      : calls_(calls), may_capture_(std::move(may_capture)) {}

  [[nodiscard]] DeviceMemory& memory() override { return bytes_; }
  [[nodiscard]] std::unique_ptr<DeviceStreams> lower(const Graph& graph, StreamPlan plan) override {
    captured.push_back(may_capture_(true));
    return std::make_unique<Streams>(*this, graph, std::move(plan));
  }
  [[nodiscard]] std::optional<DeviceProgress> progress() override {
    const std::lock_guard lock(mutex_);
    return progress_;
  }
  void drop_captures() override { ++num_drops; }

  std::vector<bool> captured;  // of each program, whether it would be
  std::atomic<int> num_drops{0};

 private:
  static constexpr std::size_t guard = 64;

  struct Streams final : DeviceStreams {
    Streams(WorkspaceDevice& device, const Graph& of, StreamPlan streams)
        : owner(device), graph(of), plan(std::move(streams)), queues(of.num_nodes()), blocks(of.num_nodes()) {
      for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
        if (!graph.has_part({node})) continue;
        const auto size = static_cast<std::size_t>(nccl::workspace_bytes(graph, {node}, owner.calls_));
        blocks[node].resize(size + 2 * guard);
        const auto address     = reinterpret_cast<std::uintptr_t>(blocks[node].data());
        queues[node].workspace = std::span(blocks[node]).subspan(guard - address % guard, size);
      }
    }
    [[nodiscard]] bool vacant() override { return true; }
    [[nodiscard]] bool replay() override { return false; }
    void begin(bool) override {
      const std::lock_guard lock(owner.mutex_);
      owner.progress_ = {};
    }
    [[nodiscard]] bool ready(Node) override { return true; }
    [[nodiscard]] const DeviceQueue* before(Node node) override {
      if (plan.stream[node.id] == StreamPlan::none) return nullptr;
      if (graph.has_part(node)) {
        std::ranges::fill(blocks[node.id], static_cast<std::byte>(++poison));
        const std::lock_guard lock(owner.mutex_);
        owner.progress_.parts_entered.push_back(node);
      }
      return &queues[node.id];
    }
    void after(Node node) override {
      {
        const std::lock_guard lock(owner.mutex_);
        std::erase(owner.progress_.parts_entered, node);
        ++owner.progress_.num_done;
        owner.progress_.last_done = node;
      }
      if (!graph.has_part(node)) return;
      const std::span<const std::byte> all(blocks[node.id]);
      const auto end =
          static_cast<std::size_t>(queues[node.id].workspace.data() - all.data()) + queues[node.id].workspace.size();
      const auto after = all.subspan(end);
      if (std::ranges::any_of(after, [&](std::byte b) { return b != after.back(); }))
        throw Error(ErrorKind::backend, "a part has written beyond its workspace");
    }
    void end(bool) override {}
    [[nodiscard]] bool done() override { return true; }
    [[nodiscard]] std::vector<NodeTime> times() override { return std::vector<NodeTime>(graph.num_nodes()); }
    [[nodiscard]] std::optional<std::uint64_t> num_done() override { return std::nullopt; }
    [[nodiscard]] std::vector<Lane> unfinished() override { return {}; }
    void abandon(std::shared_ptr<void>) noexcept override {}

    WorkspaceDevice& owner;
    Graph graph;
    StreamPlan plan;
    std::vector<DeviceQueue> queues;             // by node
    std::vector<std::vector<std::byte>> blocks;  // likewise: the workspace, with room around it
    unsigned char poison = 0;
  };

  EagerMemory bytes_;
  const nccl::CallOptions calls_;
  const std::function<bool(bool)> may_capture_;
  std::mutex mutex_;  // guards the next one
  DeviceProgress progress_;
};

struct NcclProcess {
  int process;
  NcclWorld& world;
  EmulatedNccl& library;
  WorkspaceDevice& device;
};

inline ProcessWorldOptions quiet_options(std::chrono::milliseconds timeout = std::chrono::seconds(20) * slowness()) {
  ProcessWorldOptions options{.timeout = timeout};
  options.on_failure = [](const Verdict&, const std::string&) {};
  options.on_overdue = [] {};
  return options;
}

// Calls `body` in each process, which tells the others what it has thrown. Returns that; empty: nothing.
inline std::vector<std::string> in_nccl_processes(int size, const NcclWorldOptions& options,
                                                  const std::function<void(const NcclProcess&)>& body,
                                                  const ProcessWorldOptions& process_options = quiet_options()) {
  const Places places(size);
  EmulatedNetwork network;
  return run_processes(size, [&](int process) {
    EmulatedNccl* library   = nullptr;
    WorkspaceDevice* device = nullptr;
    NcclWorld world(places.of(process), process_options, options, [&](std::function<bool(bool)> may_capture) {
      NcclWorld::Parts parts;
      auto made     = std::make_shared<WorkspaceDevice>(options.calls, std::move(may_capture));
      auto nccl     = std::make_unique<EmulatedNccl>(network);
      device        = made.get();
      library       = nccl.get();
      parts.device  = std::move(made);
      parts.library = std::move(nccl);
      return parts;
    });
    try {
      body({process, world, *library, *device});
    } catch (const std::exception& error) {
      world.fail(error.what());
      throw;
    }
  });
}

}  // namespace stepgraph::testing
