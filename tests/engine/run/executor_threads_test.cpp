// How many bodies run at once, and who runs the tiles of kernels.
#include "engine/run/executor.hpp"

#include <atomic>
#include <catch2/generators/catch_generators.hpp>
#include <thread>
#include <vector>

#include "tests/support/executor_tests.hpp"

namespace sg = stepgraph;
using namespace sg::testing::executor_tests;

namespace {

// Counts concurrent bodies, and their maximum.
class Gauge {
 public:
  void enter() {
    const int now = ++inside_;
    for (int most = most_; now > most && !most_.compare_exchange_weak(most, now);) {
    }
  }
  void leave() { --inside_; }
  [[nodiscard]] int most() const { return most_; }

 private:
  std::atomic<int> inside_{0}, most_{0};
};

}  // namespace

TEST_CASE("at most `threads` bodies compute at once, kernels included, also beside 8 waiting lanes",
          "[engine][executor][threads]") {
  const int threads = GENERATE(1, 2, 4, 8);
  CAPTURE(threads);
  // Eight ranks of one process. Each has a lane that waits until all eight wait, and compute nodes.
  sg::Graph graph(8);
  Gauge gauge;
  std::atomic<int> waiting{0}, tiles{0};
  for (int r = 0; r < 8; ++r) {
    const sg::Rank rank{r};
    graph.add({.name = "wait", .lane = graph.lane(rank, sg::LaneKind::host)}, [&](const sg::Context& c) {
      ++waiting;
      while (waiting < 8 && !c.stopping()) std::this_thread::sleep_for(100us);
    });
    for (int i = 0; i < 20; ++i) {
      graph.add({.name = "plain", .rank = rank}, [&] {
        gauge.enter();
        std::this_thread::sleep_for(50us);
        gauge.leave();
      });
    }
    for (int i = 0; i < 5; ++i) {
      graph.add({.name = "kernel", .lane = graph.lane(rank, sg::LaneKind::compute), .parallel = true},
                [&](const sg::Context& c) {
                  c.parallel_for(16, [&](std::int64_t) {
                    gauge.enter();
                    ++tiles;
                    std::this_thread::sleep_for(20us);
                    gauge.leave();
                  });
                });
    }
    graph.add({.name = "waits, then computes", .lane = graph.lane(rank, sg::LaneKind::host), .parallel = true},
              [&](const sg::Context& c) {
                c.parallel_for(4, [&](std::int64_t) {
                  gauge.enter();
                  ++tiles;
                  std::this_thread::sleep_for(20us);
                  gauge.leave();
                });
              });
  }
  WaitingWorld world(8);
  sg::Executor executor({.threads = threads, .waiting_lanes = 8, .step_timeout = 20s});
  for (int run = 0; run < 3; ++run) {
    waiting = tiles = 0;
    executor.run(graph, world);
    CHECK(waiting == 8);
    CHECK(tiles == 8 * (5 * 16 + 4));
  }
  CHECK(gauge.most() <= threads);
}

TEST_CASE("a node that is no part computes with a permit on a lane for communication too",
          "[engine][executor][threads]") {
  sg::Graph graph(4);
  Gauge gauge;
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < 10; ++i) {
      graph.add({.name = "convert", .lane = graph.lane(sg::Rank{r}, sg::LaneKind::reduce)}, [&] {
        gauge.enter();
        std::this_thread::sleep_for(50us);
        gauge.leave();
      });
    }
    graph.add({.name = "read", .lane = graph.lane(sg::Rank{r}, sg::LaneKind::disk)}, [] {});
  }
  WaitingWorld world(4);
  const sg::Program program(graph, world);
  CHECK(program.num_waiting_lanes() == 4);  // the disks
  sg::Executor executor({.threads = 2, .waiting_lanes = 4, .step_timeout = 20s});
  executor.run(program);
  CHECK(gauge.most() <= 2);
}

TEST_CASE("a parallel kernel uses the idle threads of the pool", "[engine][executor][threads]") {
  // Two tiles that wait for each other end only if two threads run them.
  sg::Graph graph;
  std::atomic<int> inside{0};
  graph.add({.name = "kernel", .parallel = true}, [&](const sg::Context& c) {
    c.parallel_for(2, [&](std::int64_t) {
      ++inside;
      while (inside < 2 && !c.stopping()) std::this_thread::yield();
    });
  });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2, .step_timeout = 20s});
  executor.run(graph, world);
  CHECK(inside == 2);
}

TEST_CASE("every tile runs once, in kernels inside kernels too", "[engine][executor][threads]") {
  std::vector<std::atomic<int>> counts(64);
  sg::Graph graph;
  graph.add({.name = "outer", .parallel = true}, [&](const sg::Context& c) {
    c.parallel_for(8, [&](std::int64_t i) {
      c.parallel_for(8, [&, i](std::int64_t k) { ++counts[static_cast<std::size_t>(8 * i + k)]; });
    });
    c.parallel_for(0, [&](std::int64_t) { ++counts[0]; });
  });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  executor.run(graph, world);
  for (const auto& count : counts) CHECK(count == 1);
}

TEST_CASE("kernels inside kernels work on a waiting lane with one thread", "[engine][executor][threads]") {
  sg::Graph graph;
  std::atomic<int> tiles{0};
  graph.add({.name = "host", .lane = graph.lane(r0, sg::LaneKind::host), .parallel = true}, [&](const sg::Context& c) {
    c.parallel_for(2, [&](std::int64_t) { c.parallel_for(2, [&](std::int64_t) { ++tiles; }); });
  });
  WaitingWorld world(1);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1, .step_timeout = 10s});
  executor.run(graph, world);
  CHECK(tiles == 4);
}

TEST_CASE("a thread goes on computing, and leaves a node that waits to another thread", "[engine][executor][threads]") {
  sg::Graph graph;
  const sg::Buffer made = graph.token(r0, "made");
  std::thread::id first, next;
  const auto note = [](std::thread::id& where) {
    return [&where](const sg::Context&) { where = std::this_thread::get_id(); };
  };
  graph.add({.name = "first", .writes = {made}}, note(first));
  graph.add({.name = "next", .reads = {made}}, note(next));
  graph.add({.name = "waits", .lane = graph.lane(r0, sg::LaneKind::host), .reads = {made}}, [](const sg::Context&) {});
  WaitingWorld world(1);
  sg::Program program(graph, world);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1, .step_timeout = 10s});
  for (int i = 0; i < 20; ++i) {
    executor.run(program);
    REQUIRE(first == next);
  }
}

TEST_CASE("a tile may announce on any thread what it waits for", "[engine][executor][threads]") {
  sg::Graph graph;
  graph.add({.name = "kernel", .parallel = true}, [&](const sg::Context& c) {
    c.parallel_for(64, [&](std::int64_t) {
      c.waiting_for("nothing much");
      std::this_thread::sleep_for(100us);
    });
  });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  CHECK_NOTHROW(executor.run(graph, world));
}
