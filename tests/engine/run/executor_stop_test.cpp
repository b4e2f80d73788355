// Steps that fail, are cancelled or time out.
#include "engine/run/executor.hpp"

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "tests/support/executor_tests.hpp"

namespace sg = stepgraph;
using namespace sg::testing::executor_tests;

SCENARIO("a failing node stops the step", "[engine][executor][errors]") {
  GIVEN("a chain in which `forward` throws once") {
    sg::Graph graph(2);
    const auto lane        = graph.lane(sg::Rank{1}, sg::LaneKind::compute);
    const sg::Buffer token = graph.token(sg::Rank{1});
    bool fails = true, sent = false;
    graph.add({.name = "load", .lane = lane, .writes = {token}}, [] {});
    graph.add({.name = "forward", .lane = lane}, [&fails] {
      if (std::exchange(fails, false)) throw std::runtime_error("out of luck");
    });
    graph.add({.name = "send", .reads = {token}, .writes = {}, .rank = sg::Rank{1}}, [] {});
    graph.add({.name = "last", .lane = lane}, [&sent] { sent = true; });
    sg::LoopbackWorld world(2);
    sg::Executor executor({.threads = 2});
    const sg::Program program(graph, world);
    WHEN("it runs") {
      sg::Run run = executor.start(program);
      THEN("get() names node, rank, lane and cause, nothing after it starts, and the next run works") {
        CHECK_THROWS_MATCHES(run.get(), sg::Error,
                             MessageMatches(ContainsSubstring("rank 1 compute 'forward': out of luck")));
        CHECK_FALSE(sent);
        executor.run(program);
        CHECK(sent);
      }
    }
  }
}

TEST_CASE("an exception in a body is reported with its kind", "[engine][executor][errors]") {
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const auto kind_of = [&](auto&& body) {
    sg::Graph graph;
    graph.add({.name = "n"}, body);
    try {
      executor.run(graph, world);
    } catch (const sg::Error& error) {
      return error.kind();
    }
    return sg::ErrorKind::config;
  };
  CHECK(kind_of([] { throw sg::Error(sg::ErrorKind::backend, "no device"); }) == sg::ErrorKind::backend);
  CHECK(kind_of([] { throw std::logic_error("mine"); }) == sg::ErrorKind::run);
  CHECK(kind_of([] { throw 7; }) == sg::ErrorKind::run);
  CHECK(kind_of([](const sg::Context& c) { (void)c.read<float>(0); }) == sg::ErrorKind::run);
}

TEST_CASE("a step can be cancelled from outside", "[engine][executor][cancel]") {
  sg::Graph graph;
  const sg::Buffer token = graph.token(r0);
  std::atomic<bool> started{false}, after{false};
  graph.add({.name = "long", .writes = {token}}, [&](const sg::Context& c) {
    started = true;
    while (!c.stopping()) std::this_thread::yield();
  });
  graph.add({.name = "after", .reads = {token}}, [&] { after = true; });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const sg::Program program(graph, world);
  sg::Run run = executor.start(program);
  std::thread canceller([&] {
    while (!started) std::this_thread::yield();
    run.cancel("interrupted by the user");
  });
  const std::string error = error_of([&] { run.get(); });
  canceller.join();
  CHECK_THAT(error, ContainsSubstring("step: interrupted by the user; running at that time: rank 0 (no lane) 'long'"));
  CHECK_FALSE(after);
  CHECK_THAT(error_of([&] { run.get(); }), ContainsSubstring("get() was called before"));
}

TEST_CASE("cancelling a step that has ended changes nothing", "[engine][executor][cancel]") {
  sg::Graph graph;
  graph.add({.name = "n"}, [] {});
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  sg::Run run = executor.start(sg::Program(graph, world));
  while (!run.done()) std::this_thread::yield();
  run.cancel();
  CHECK_NOTHROW(run.get());
}

TEST_CASE("a step that times out names the running nodes and what they wait for", "[engine][executor][timeout]") {
  sg::Graph graph(2, r0);
  const sg::Group pair = graph.group({.name = "pair", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  const sg::Buffer x   = graph.buffer({.name = "x", .size_bytes = 4});
  graph.add({.name   = "get x",
             .lane   = graph.lane(r0, sg::LaneKind::pp_recv),
             .writes = {x},
             .part   = sg::PartSpec{.group = pair, .op = sg::PartOp::recv, .peer = sg::Rank{1}, .message = "x"}});
  graph.add({.name = "read file", .lane = graph.lane(r0, sg::LaneKind::disk)}, [](const sg::Context& c) {
    c.waiting_for("block 7 of weights.bin");
    while (!c.stopping()) std::this_thread::sleep_for(1ms);
  });
  WaitingWorld world(2, r0);  // rank 1 never sends
  sg::Executor executor({.threads = 1, .waiting_lanes = 2, .step_timeout = 300ms});
  const std::string error = error_of([&] { executor.run(graph, world); });
  CHECK_THAT(error, ContainsSubstring("step: ran out of time after 300 ms"));
  CHECK_THAT(error, ContainsSubstring("rank 0 pp_recv 'get x', waiting for recv 'x' on group 'pair' with rank 1"));
  CHECK_THAT(error, ContainsSubstring("rank 0 disk 'read file', waiting for block 7 of weights.bin"));
  CHECK(world.aborts() == 1);

  sg::Graph quick(2, r0);
  quick.add({.name = "n", .rank = r0}, [] {});
  CHECK_NOTHROW(executor.run(quick, world));  // all workers are back
}

TEST_CASE("a time-out is noticed by done() too", "[engine][executor][timeout]") {
  sg::Graph graph;
  graph.add({.name = "long"}, [](const sg::Context& c) {
    while (!c.stopping()) std::this_thread::yield();
  });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1, .step_timeout = 100ms});
  sg::Run run = executor.start(sg::Program(graph, world));
  while (!run.done()) std::this_thread::yield();
  CHECK_THAT(error_of([&] { run.get(); }), ContainsSubstring("ran out of time"));
}

TEST_CASE("a body that does not return is named and does not hang the caller", "[engine][executor][timeout]") {
  // Data that the body uses must outlive it: the executor cannot stop it.
  static std::atomic<bool> release{false}, released{false};
  static sg::LoopbackWorld world(1);
  {
    sg::Executor executor({.threads = 2, .step_timeout = 200ms, .drain_timeout = 50ms});
    sg::Graph graph;
    graph.add({.name = "stubborn"}, [] {
      while (!release) std::this_thread::sleep_for(1ms);
      released = true;
    });
    const std::string error = error_of([&] { executor.run(graph, world); });
    CHECK_THAT(error, ContainsSubstring("50 ms later these nodes still run: rank 0 (no lane) 'stubborn'"));
    sg::Graph other;
    other.add({.name = "n"}, [] {});
    CHECK_THAT(error_of([&] { executor.run(other, world); }),
               ContainsSubstring("a step is still under way (rank 0 (no lane) 'stubborn')"));
  }
  release = true;
  while (!released) std::this_thread::yield();
}

TEST_CASE("a tile that throws ends its kernel and names the node", "[engine][executor][errors]") {
  sg::Graph graph;
  graph.add({.name = "kernel", .parallel = true}, [](const sg::Context& c) {
    c.parallel_for(100, [](std::int64_t i) {
      if (i == 37) throw std::runtime_error("tile 37 is bad");
    });
  });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  CHECK_THAT(error_of([&] { executor.run(graph, world); }), ContainsSubstring("'kernel': tile 37 is bad"));
}

TEST_CASE("a world is told of a failure before the step ends, never during the next", "[engine][executor][cancel]") {
  sg::Graph graph(2, r0);
  graph.add({.name = "long", .rank = r0}, [](const sg::Context& c) {
    while (!c.stopping()) std::this_thread::yield();
  });
  WaitingWorld world(2, r0);
  sg::Executor executor({.threads = 1});
  const sg::Program program(graph, world);
  for (int i = 1; i <= 50; ++i) {
    sg::Run run = executor.start(program);
    std::thread canceller([&] { run.cancel(); });
    CHECK_THROWS_AS(run.get(), sg::Error);
    CHECK(world.aborts() == i);  // told by the time get() returns
    canceller.join();
  }
}

TEST_CASE("a step in which no node ends for a while is stopped, a slow one is not", "[engine][executor][timeout]") {
  sg::LoopbackWorld world(1);
  sg::Graph graph;
  const sg::Lane lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  SECTION("slow") {
    for (int i = 0; i < 8; ++i)
      graph.add({.name = "slow", .lane = lane}, [] { std::this_thread::sleep_for(std::chrono::milliseconds(60)); });
    sg::Executor executor({.threads = 1, .stall_timeout = std::chrono::seconds(5)});
    CHECK_NOTHROW(executor.run(graph, world));
  }
  SECTION("stuck") {
    graph.add({.name = "quick", .lane = lane}, [] {});
    graph.add({.name = "stuck", .lane = lane}, [](const sg::Context& context) {
      while (!context.stopping()) std::this_thread::yield();
    });
    sg::Executor executor({.threads = 1, .stall_timeout = std::chrono::milliseconds(1000)});
    CHECK_THROWS_MATCHES(executor.run(graph, world), sg::Error,
                         MessageMatches(ContainsSubstring("step: no node has ended for 1000 ms; running at that time: "
                                                          "rank 0 compute 'stuck'")));
  }
  SECTION("not looked at for a while, as when the process is suspended") {
    std::atomic<bool> go{false};
    graph.add({.name = "held", .lane = lane}, [&](const sg::Context& context) {
      while (!go && !context.stopping()) std::this_thread::yield();
    });
    sg::Executor executor({.threads = 1, .stall_timeout = std::chrono::milliseconds(1500)});
    const sg::Program program(graph, world);
    sg::Run run = executor.start(program);
    std::this_thread::sleep_for(std::chrono::milliseconds(1600));
    CHECK_FALSE(run.done());
    go = true;
    CHECK_NOTHROW(run.get());
  }
}
