#include "engine/run/run_view.hpp"

#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <memory>
#include <thread>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/worlds/hub_world.hpp"
#include "tests/support/worlds/thread_peers.hpp"

namespace sg = stepgraph;

namespace {

// Keeps the view of its run, as a world with heartbeats does.
class ViewedWorld final : public sg::testing::HubWorld {
 public:
  using HubWorld::HubWorld;
  void begin_step(std::shared_ptr<const sg::RunView> run) override {
    view = run;
    HubWorld::begin_step(std::move(run));
  }
  void end_step() noexcept override { ++num_ends; }
  std::shared_ptr<const sg::RunView> view;
  int num_ends = 0;
};

std::vector<std::string> names(const sg::RunView& view) {
  std::vector<std::string> found;
  for (const auto& each : view.last_nodes()) found.emplace_back(view.graph().name(each.node));
  return found;
}

}  // namespace

TEST_CASE("a view of a run shows nodes that run, what they wait for, and the last ones that ended",
          "[engine][executor][threads]") {
  sg::testing::Hub hub(2);
  sg::testing::PeersHub peers(1);
  ViewedWorld world(hub, sg::RankSet::all(2), &peers.of(0));
  sg::Graph graph(2);
  std::atomic<int> stage{0};
  const auto hold = [&](int until) {
    ++stage;
    while (stage < until) std::this_thread::yield();
  };
  graph.add({.name = "a", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute)}, [] {});
  graph.add({.name = "b", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute)}, [] {});
  graph.add({.name = "held", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute)}, [&](const sg::Context& context) {
    context.waiting_for(sg::Rank{1});
    hold(3);
  });
  graph.add({.name = "computes", .lane = graph.lane(sg::Rank{1}, sg::LaneKind::compute)}, [&] { hold(3); });
  const sg::Program program(graph, world);
  sg::Executor executor({.threads = 2});
  sg::Run run = executor.start(program);
  while (stage < 2) std::this_thread::yield();
  const sg::RunView& view = *world.view;
  CHECK(view.graph().num_nodes() == 4);
  CHECK(view.nodes_done() == 2);
  CHECK(view.num_computing() == 1);
  CHECK(names(view) == std::vector<std::string>{"a", "b"});
  const auto running = view.running();
  REQUIRE(running.size() == 2);
  for (const auto& each : running) {
    const bool held = view.graph().name(each.node) == "held";
    CHECK(each.waits_for == (held ? std::optional(sg::Rank{1}) : std::nullopt));
  }
  CHECK(world.num_ends == 0);
  stage = 3;
  run.get();
  CHECK(world.num_ends == 1);
  CHECK(view.nodes_done() == 4);
  CHECK(view.running().empty());
  CHECK(names(view).size() == 4);
  const auto last = view.last_nodes();
  CHECK(std::is_sorted(last.begin(), last.end(), [](const auto& a, const auto& b) { return a.ago_s > b.ago_s; }));

  executor.run(program);  // counts anew
  CHECK(world.view->nodes_done() == 4);
  CHECK(names(*world.view).size() == 4);
}

TEST_CASE("a view can be used by any thread, also when its program is gone", "[engine][executor][threads]") {
  sg::testing::Hub hub(1);
  sg::testing::PeersHub peers(1);
  ViewedWorld world(hub, sg::RankSet::all(1), &peers.of(0));
  std::shared_ptr<const sg::RunView> view;
  std::atomic<bool> over{false};
  std::thread watcher;
  {
    sg::Graph graph;
    for (int i = 0; i < 600; ++i)
      graph.add({.name = "node", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute)}, [] {});
    const sg::Program program(graph, world);
    sg::Executor executor({.threads = 2});
    executor.run(program);
    view    = world.view;
    watcher = std::thread([&] {
      do {
        static_cast<void>(view->running());
        static_cast<void>(view->last_nodes());
        static_cast<void>(view->nodes_done());
      } while (!over);
    });
    for (int i = 0; i < 20; ++i) executor.run(program);
  }
  over = true;
  watcher.join();
  CHECK(view->nodes_done() == 600);
  CHECK(view->last_nodes().size() >= 255);
}
