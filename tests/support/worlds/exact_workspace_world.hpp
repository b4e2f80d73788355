#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/device.hpp"
#include "engine/run/streams.hpp"
#include "engine/run/world.hpp"

// A world on a device whose bodies get exactly the workspace that their nodes declare, though their streams may have
// more.
namespace stepgraph::testing {

class ExactWorkspaceWorld final : public World {
 public:
  explicit ExactWorkspaceWorld(World& of) : of_(of), device_(*of.device()) {}

  [[nodiscard]] int num_ranks() const override { return of_.num_ranks(); }
  [[nodiscard]] bool waits(LaneKind kind) const override { return of_.waits(kind); }
  [[nodiscard]] IssueOrder issue_order() const override { return of_.issue_order(); }
  [[nodiscard]] Device* device() const override { return &device_; }
  [[nodiscard]] std::int64_t part_workspace(const Graph& graph, Node part) const override {
    return of_.part_workspace(graph, part);
  }
  void communicate(const Context& context, const Exchange& exchange) override { of_.communicate(context, exchange); }
  void abort(std::string_view why) noexcept override { of_.abort(why); }

 private:
  struct Streams final : DeviceStreams {
    Streams(std::unique_ptr<DeviceStreams> streams, const Graph& graph)
        : inner(std::move(streams)), declared(graph), queues(graph.num_nodes()) {}
    [[nodiscard]] bool vacant() override { return inner->vacant(); }
    [[nodiscard]] bool replay() override { return inner->replay(); }
    void begin(bool recorded) override { inner->begin(recorded); }
    [[nodiscard]] bool ready(Node node) override { return inner->ready(node); }
    [[nodiscard]] const DeviceQueue* before(Node node) override {
      const DeviceQueue* const given = inner->before(node);
      if (given == nullptr || declared.has_part(node)) return given;
      const auto bytes = static_cast<std::size_t>(declared.workspace_bytes(node));
      if (given->workspace.size() < bytes)
        throw Error(ErrorKind::backend, str("the stream has ", given->workspace.size(), " bytes of workspace, but ",
                                            declared.describe(node), " declares ", bytes));
      DeviceQueue& queue = queues[node.id];
      queue              = *given;
      queue.workspace    = given->workspace.first(bytes);
      return &queue;
    }
    void after(Node node) override { inner->after(node); }
    void end(bool good) override { inner->end(good); }
    [[nodiscard]] bool done() override { return inner->done(); }
    [[nodiscard]] std::vector<NodeTime> times() override { return inner->times(); }
    [[nodiscard]] std::optional<std::uint64_t> num_done() override { return inner->num_done(); }
    [[nodiscard]] std::vector<Lane> unfinished() override { return inner->unfinished(); }
    void abandon(std::shared_ptr<void> program) noexcept override { inner->abandon(std::move(program)); }

    std::unique_ptr<DeviceStreams> inner;
    Graph declared;
    std::vector<DeviceQueue> queues;  // by node
  };
  struct ExactDevice final : Device {
    explicit ExactDevice(Device& of) : inner(of) {}
    [[nodiscard]] DeviceMemory& memory() override { return inner.memory(); }
    [[nodiscard]] std::unique_ptr<DeviceStreams> lower(const Graph& graph, StreamPlan plan) override {
      return std::make_unique<Streams>(inner.lower(graph, std::move(plan)), graph);
    }
    Device& inner;
  };

  World& of_;
  mutable ExactDevice device_;
};

}  // namespace stepgraph::testing
