#include "engine/run/executor.hpp"

#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/worlds/waiting_world.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::WaitingWorld;

namespace {

constexpr sg::Rank r0{0};

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const sg::Error& error) {
    return error.what();
  }
  return "no error";
}

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

TEST_CASE("bodies run in the order of their edges and see what was written before", "[engine][executor]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 400, .type = sg::DType::i32});
  const sg::Buffer y =
      graph.buffer({.name = "y", .size_bytes = 4, .type = sg::DType::i32, .lifetime = sg::Lifetime::persistent});
  graph.add({.name = "fill", .writes = {x}}, [](const sg::Context& c) {
    const auto out = c.write<std::int32_t>();
    std::iota(out.begin(), out.end(), 1);
  });
  graph.add({.name = "odd", .reads = {x.strided(4, 4, 8, 50)}, .accumulates = {y}}, [](const sg::Context& c) {
    const auto rows = c.read_rows<std::int32_t>();
    for (std::int64_t i = 0; i < rows.count; ++i) c.accumulate<std::int32_t>()[0] += rows[i][0];
  });
  graph.add({.name = "double", .accumulates = {y}}, [](const sg::Context& c) { c.accumulate<std::int32_t>()[0] *= 2; });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  const sg::Program program(graph, world);
  executor.run(program);
  CHECK(program.memory().span<std::int32_t>(y)[0] == 2 * 2550);  // 2 + 4 + ... + 100
  executor.run(program);
  CHECK(program.memory().span<std::int32_t>(y)[0] == 2 * (2 * 2550 + 2550));
  CHECK(program.num_tasks() == 3);
  CHECK(program.num_task_edges() == 2);
}

TEST_CASE("a graph rebuilt for every step continues with the same memory", "[engine][executor]") {
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  std::shared_ptr<sg::Memory> memory;
  sg::Buffer sum;
  for (int step = 1; step <= 5; ++step) {
    sg::Graph graph;
    sum = graph.buffer({.name = "sum", .size_bytes = 4, .type = sg::DType::i32, .lifetime = sg::Lifetime::persistent});
    graph.add({.name = "add", .accumulates = {sum}},
              [step](const sg::Context& c) { c.accumulate<std::int32_t>()[0] += step; });
    if (!memory) memory = std::make_shared<sg::Memory>(graph);
    executor.run(sg::Program(graph, world, memory));
  }
  CHECK(memory->span<std::int32_t>(sum)[0] == 15);

  sg::Graph other;
  (void)other.buffer({.name = "sum", .size_bytes = 8});
  CHECK_THAT(error_of([&] { sg::Program(other, world, memory); }),
             ContainsSubstring("buffer 'sum' has 8 bytes, but 4"));
}

TEST_CASE("a program outlives the graph and the memory it was made from", "[engine][executor]") {
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  std::optional<sg::Program> program;
  std::vector<int> ran;
  {
    sg::Graph graph;
    const sg::Buffer token = graph.token(r0);
    for (int i = 0; i < 3; ++i) graph.add({.name = "n", .accumulates = {token}}, [&ran, i] { ran.push_back(i); });
    program.emplace(graph, world);
    graph.add({.name = "later", .accumulates = {token}}, [&ran] { ran.push_back(99); });
  }
  executor.run(*program);
  CHECK(ran == std::vector{0, 1, 2});
}

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

TEST_CASE("a body can access only what its node declared, in the declared mode", "[engine][executor][refuses]") {
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const auto error = [&](auto&& body) {
    sg::Graph graph;
    const sg::Buffer x =
        graph.buffer({.name = "x", .size_bytes = 16, .type = sg::DType::f32, .lifetime = sg::Lifetime::persistent});
    graph.add({.name = "n", .reads = {x, x.strided(0, 4, 8, 2), x.range(2, 4)}, .writes = {graph.token(r0)}}, body);
    return error_of([&] { executor.run(graph, world); });
  };
  CHECK_THAT(error([](const sg::Context& c) { (void)c.read<float>(3); }),
             ContainsSubstring("read(3): the node declares 3 such accesses"));
  CHECK_THAT(error([](const sg::Context& c) { (void)c.accumulate<float>(); }),
             ContainsSubstring("declares 0 such accesses"));
  CHECK_THAT(error([](const sg::Context& c) { (void)c.read<double>(0); }), ContainsSubstring("holds f32"));
  CHECK_THAT(error([](const sg::Context& c) { (void)c.read<std::int32_t>(0); }),
             ContainsSubstring("holds f32, but read(0) asks for i32"));
  CHECK_THAT(error([](const sg::Context& c) { (void)c.read<float>(1); }), ContainsSubstring("use read_rows"));
  CHECK_THAT(error([](const sg::Context& c) { (void)c.read<float>(2); }), ContainsSubstring("not whole elements"));
  CHECK_THAT(error([](const sg::Context& c) { (void)c.write(0); }), ContainsSubstring("is a token"));
  CHECK_THAT(error([](const sg::Context& c) { c.parallel_for(2, [](std::int64_t) {}); }),
             ContainsSubstring("set .parallel = true"));
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

TEST_CASE("one executor runs one step at a time, and a program runs once at a time", "[engine][executor][refuses]") {
  std::atomic<bool> go{false};
  sg::Graph graph;
  graph.add({.name = "held"}, [&] {
    while (!go) std::this_thread::yield();
  });
  sg::LoopbackWorld world(1);
  sg::Executor one({.threads = 1}), two({.threads = 1});
  const sg::Program program(graph, world), again(graph, world);
  sg::Run run             = one.start(program);
  const std::string first = error_of([&] { one.run(again); }), second = error_of([&] { two.run(program); });
  go = true;
  run.get();
  CHECK_THAT(first, ContainsSubstring("one executor runs one step at a time"));
  CHECK_THAT(second, ContainsSubstring("under way on another executor"));
  CHECK_NOTHROW(two.run(program));
}

TEST_CASE("a dropped run is waited for", "[engine][executor]") {
  std::atomic<bool> ended{false};
  sg::Graph graph;
  graph.add({.name = "slow"}, [&] {
    std::this_thread::sleep_for(20ms);
    ended = true;
  });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  { const sg::Run run = executor.start(sg::Program(graph, world)); }
  CHECK(ended);
}

TEST_CASE("at most `threads` bodies compute at once, kernels included, also beside 8 waiting lanes",
          "[engine][executor][threads]") {
  const int threads = GENERATE(1, 2);
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

TEST_CASE("a pool too small for the waiting lanes is refused", "[engine][executor][refuses]") {
  sg::Graph graph(2);
  for (int rank = 0; rank < 2; ++rank) {
    graph.add({.name = "n", .lane = graph.lane(sg::Rank{rank}, sg::LaneKind::host)}, [] {});
    graph.add({.name = "n", .lane = graph.lane(sg::Rank{rank}, sg::LaneKind::disk)}, [] {});
  }
  WaitingWorld world(2);
  sg::Executor executor({.threads = 2, .waiting_lanes = 3});
  CHECK_THAT(error_of([&] { executor.run(graph, world); }),
             ContainsSubstring("4 lanes that wait (rank 0 disk, rank 0 host, rank 1 disk, rank 1 host)") &&
                 ContainsSubstring("at least 4"));
  CHECK_THROWS_MATCHES(sg::verify(graph, {.world = &world, .waiting_lanes = 3}), sg::Error,
                       MessageMatches(ContainsSubstring("too few workers: 4 lanes wait")));
  CHECK_NOTHROW(sg::verify(graph, {.world = &world, .waiting_lanes = 4}));
  CHECK_THAT(error_of([] { sg::Executor({.threads = -1}); }), ContainsSubstring("threads = -1"));
}

TEST_CASE("a part on no lane, or on one that does not wait, is refused in a world whose parts wait",
          "[engine][executor][refuses]") {
  WaitingWorld world(2, r0);
  for (const bool on_lane : {false, true}) {
    sg::Graph graph(2, r0);
    const sg::Group pair = graph.group({.name = "pair", .ranks = {sg::Rank{0}, sg::Rank{1}}});
    if (on_lane) {
      graph.add({.name = "sync", .lane = graph.lane(r0, sg::LaneKind::compute), .part = sg::PartSpec{.group = pair}});
    } else {
      graph.add({.name = "sync", .part = sg::PartSpec{.group = pair}, .rank = r0});
    }
    CHECK_THAT(error_of([&] { sg::Program(graph, world); }),
               ContainsSubstring(on_lane ? "part 'sync' of rank 0 has lane compute, which does not wait"
                                         : "part 'sync' of rank 0 has no lane"));
  }
}

TEST_CASE("two groups of the same ranks must have different names", "[engine][executor][refuses]") {
  for (const bool same : {false, true}) {
    sg::Graph graph(2);
    for (const char* name : {"pair", same ? "pair" : "other"}) {
      const sg::Group group = graph.group({.name = name, .ranks = {sg::Rank{0}, sg::Rank{1}}});
      for (int rank = 0; rank < 2; ++rank)
        graph.add({.name = "sync", .part = sg::PartSpec{.group = group}, .rank = sg::Rank{rank}});
    }
    sg::LoopbackWorld world(2);
    CHECK_THAT(error_of([&] { sg::Program(graph, world); }),
               ContainsSubstring(same ? "two groups of the same ranks have the name 'pair'" : "no error"));
  }
}

TEST_CASE("a graph for another number of ranks is refused", "[engine][executor][refuses]") {
  sg::Graph graph(2);
  sg::LoopbackWorld world(3);
  CHECK_THAT(error_of([&] { sg::Program(graph, world); }),
             ContainsSubstring("the graph is for 2 ranks, the world has 3"));
}

TEST_CASE("an empty graph runs", "[engine][executor]") {
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  CHECK_NOTHROW(executor.run(sg::Graph(), world));
}

TEST_CASE("an old run of a program does not free it for a second run at the same time", "[engine][executor][refuses]") {
  std::atomic<bool> go{true};
  sg::Graph graph, other;
  graph.add({.name = "held"}, [&] {
    while (!go) std::this_thread::yield();
  });
  other.add({.name = "n"}, [] {});
  sg::LoopbackWorld world(1);
  sg::Executor one({.threads = 1}), two({.threads = 1});
  const sg::Program program(graph, world), quick(other, world);
  one.run(program);
  go          = false;
  sg::Run run = two.start(program);
  one.run(quick);
  const std::string error = error_of([&] { one.run(program); });
  go                      = true;
  run.get();
  CHECK_THAT(error, ContainsSubstring("under way on another executor"));
}

TEST_CASE("a run can be queried after its executor is destroyed, and assigning another run waits for it",
          "[engine][executor]") {
  std::atomic<int> started{0}, ended{0};
  sg::Graph graph;
  graph.add({.name = "slow"}, [&](const sg::Context& c) {
    ++started;
    for (int i = 0; i < 20 && !c.stopping(); ++i) std::this_thread::sleep_for(1ms);
    ++ended;
  });
  sg::LoopbackWorld world(1);
  std::optional<sg::Run> run;
  {
    sg::Executor executor({.threads = 1});
    run.emplace(executor.start(sg::Program(graph, world)));
    while (started < 1) std::this_thread::yield();
  }
  CHECK(ended == 1);
  CHECK_THAT(error_of([&] { run->get(); }), ContainsSubstring("its executor was destroyed"));

  sg::Executor executor({.threads = 1}), another({.threads = 1});
  const sg::Program program(graph, world), second(graph, world);
  sg::Run first = executor.start(program);
  first         = another.start(second);
  CHECK(ended >= 2);
  CHECK_NOTHROW(executor.run(program));
  first.get();
}

TEST_CASE("a program is free again once its run is done", "[engine][executor]") {
  sg::Graph graph;
  graph.add({.name = "n"}, [] {});
  sg::LoopbackWorld world(1);
  sg::Executor one({.threads = 1}), two({.threads = 1});
  const sg::Program program(graph, world);
  sg::Run run = one.start(program);
  while (!run.done()) std::this_thread::yield();
  CHECK_NOTHROW(two.run(program));
  CHECK_NOTHROW(run.get());
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

TEST_CASE("time-outs must not be negative", "[engine][executor][refuses]") {
  CHECK_THAT(error_of([] { sg::Executor({.step_timeout = -5ms}); }), ContainsSubstring("not negative"));
}

TEST_CASE("a program has the ranks of its process, no more and no fewer", "[engine][executor][refuses]") {
  sg::Graph graph(2);
  const sg::Group pair = graph.group({.name = "pair", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  for (int rank = 0; rank < 2; ++rank)
    graph.add({.name = "sync", .part = sg::PartSpec{.group = pair}, .rank = sg::Rank{rank}});
  sg::LoopbackWorld all(2);
  CHECK_THAT(error_of([&] { sg::Program(sg::slice(graph, r0), all); }),
             ContainsSubstring("the graph holds rank 0, this process of the world has ranks 0 and 1"));
  sg::testing::WaitingWorld first(2, r0);
  CHECK_THAT(error_of([&] { sg::Program(graph, first); }),
             ContainsSubstring("the graph holds ranks 0 and 1, this process of the world has rank 0"));
}

TEST_CASE("a world's issue order becomes edges between parts", "[engine][executor][parts]") {
  // Two communications of one rank on different lanes and groups, with no other order between them.
  class OrderedWorld final : public sg::World {
   public:
    explicit OrderedWorld(sg::IssueOrder order) : order_(order) {}
    [[nodiscard]] int num_ranks() const override { return 2; }
    [[nodiscard]] sg::RankSet local_ranks() const override { return r0; }
    [[nodiscard]] bool waits(sg::LaneKind) const override { return false; }
    [[nodiscard]] sg::IssueOrder issue_order() const override { return order_; }
    void communicate(const sg::Context&, const sg::Exchange&) override {}
    void abort(std::string_view) noexcept override {}

   private:
    sg::IssueOrder order_;
  };
  const auto num_edges = [](sg::IssueOrder order, bool one_group, int second_issue) {
    sg::Graph graph(2, r0);
    const sg::Group a = graph.group({.name = "a", .ranks = {sg::Rank{0}, sg::Rank{1}}});
    const sg::Group b = one_group ? a : graph.group({.name = "b", .ranks = {sg::Rank{0}, sg::Rank{1}}});
    graph.add(
        {.name = "first", .lane = graph.lane(r0, sg::LaneKind::gather), .part = sg::PartSpec{.group = a, .issue = 0}});
    graph.add({.name = "second",
               .lane = graph.lane(r0, sg::LaneKind::reduce),
               .part = sg::PartSpec{.group = b, .issue = second_issue}});
    OrderedWorld world(order);
    return sg::Program(graph, world).num_task_edges();
  };
  CHECK(num_edges(sg::IssueOrder::any, true, 1) == 0);
  CHECK(num_edges(sg::IssueOrder::per_communicator, true, 1) == 1);
  CHECK(num_edges(sg::IssueOrder::per_communicator, false, 1) == 0);
  CHECK(num_edges(sg::IssueOrder::per_rank, false, 1) == 1);
  CHECK(num_edges(sg::IssueOrder::per_rank, false, 0) == 0);  // issued together
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
