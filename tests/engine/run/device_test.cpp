// Programs on a device that executes work as soon as it is enqueued. Shows what the engine asks of a device, and in
// which order.
#include "engine/run/device.hpp"

#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/streams.hpp"
#include "engine/verify/verify.hpp"
#include "ops/transfers/collectives.hpp"
#include "tests/support/worlds/eager_world.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::EagerWorld;

namespace {

// Each rank adds its number to x, then an all-reduce sums x.
sg::Graph summing(int ranks, std::vector<sg::Buffer>& x) {
  sg::Graph graph(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    x.push_back(graph.buffer({.name       = "x",
                              .rank       = sg::Rank{rank},
                              .size_bytes = 8,
                              .type       = sg::DType::f64,
                              .lifetime   = sg::Lifetime::persistent}));
    graph.add({.name        = "add",
               .lane        = graph.lane(sg::Rank{rank}, sg::LaneKind::compute),
               .accumulates = x.back(),
               .device      = true},
              [rank](const sg::Context& context) {
                if (context.device() == nullptr) throw std::runtime_error("is not on a device");
                context.accumulate<double>()[0] += rank + 1;
              });
  }
  std::vector<sg::Rank> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(sg::Rank{rank});
  const sg::Group group = graph.group({.name = "all", .ranks = all});
  for (int rank = 0; rank < ranks; ++rank) {
    graph.add({.name        = "sum",
               .lane        = graph.lane(sg::Rank{rank}, sg::LaneKind::reduce),
               .accumulates = x[static_cast<std::size_t>(rank)],
               .part        = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce, .type = sg::DType::f64},
               .kind        = sg::NodeKind::communicate});
  }
  return graph;
}

}  // namespace

TEST_CASE("a program on a device issues every node once, in an order that edges allow", "[engine][device]") {
  EagerWorld world(3);
  std::vector<sg::Buffer> x;
  const sg::Graph graph = summing(3, x);
  sg::Executor executor({.threads = 2});
  {
    const sg::MemoryPlan plan = sg::plan_memory(graph);
    const sg::Program program(sg::RunnableGraph(graph, plan), world);
    executor.run(program);
    for (const sg::Buffer each : x) CHECK(program.memory().first<double>(each) == 6);
    CHECK(world.eager.order.size() == 6);
    CHECK(world.eager.num_after == 6);
    CHECK(program.issue_s() > 0);
    CHECK(world.eager.good);
    CHECK(world.parts_with_queue == 3);
    const auto place = [&](std::uint32_t node) {
      return std::find(world.eager.order.begin(), world.eager.order.end(), node) - world.eager.order.begin();
    };
    for (std::uint32_t rank = 0; rank < 3; ++rank) CHECK(place(rank) < place(3 + rank));
    executor.run(program);
    CHECK(program.memory().first<double>(x[0]) == 24);
    CHECK_THROWS_MATCHES(program.memory().span<double>(x[0]), sg::Error,
                         MessageMatches(ContainsSubstring("is on a device (read() and write() copy)")));
    sg::Recorder recorder;
    executor.run(program, &recorder);
    CHECK(recorder.timeline().makespan_s == 2);
  }
  CHECK(world.eager.bytes.held == 0);  // an executor holds no memory
}

TEST_CASE("a program's streams are those that can be planned and proved without a device", "[engine][device]") {
  EagerWorld world(3);
  std::vector<sg::Buffer> x;
  sg::Graph graph = summing(3, x);
  for (int i = 0; i < 3; ++i) graph.add({.name = "later", .lane = graph.lane(sg::Rank{1}, sg::LaneKind::h2d)});
  const sg::MemoryPlan plan = sg::plan_memory(graph);
  const sg::Program program(sg::RunnableGraph(graph, plan), world);
  const sg::StreamPlan planned = sg::plan_streams({graph, plan}, sg::LoopbackWorld(3)), &had = world.eager.last_plan;
  CHECK_FALSE(std::is_sorted(planned.issue_order.begin(), planned.issue_order.end()));  // along the plan
  CHECK(had.issue_order == planned.issue_order);
  CHECK(had.stream == planned.stream);
  CHECK(had.waits == planned.waits);
  CHECK(had.loop_waits == planned.loop_waits);
  CHECK(planned.num_streams() == 7);
}

TEST_CASE("a node that a device cannot run is refused or named", "[engine][device][refuses]") {
  EagerWorld world(1);
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8, .lifetime = sg::Lifetime::persistent});
  SECTION("a body without device support") {
    graph.add({.name = "mine", .writes = x, .op = "my_op"}, [] {});
    CHECK_THROWS_MATCHES(sg::Program(graph, world), sg::Error,
                         MessageMatches(ContainsSubstring("op 'my_op', has no kernel for a device")));
    CHECK_THROWS_MATCHES(
        sg::verify(graph, {.world = &world}), sg::Error,
        MessageMatches(ContainsSubstring("not on the device: rank 0 (no lane) 'mine', op 'my_op', has no ")));
  }
  SECTION("a host node with memory that the host cannot use") {
    const auto lane       = graph.lane(sg::Rank{0}, sg::LaneKind::host);
    const sg::Buffer seen = graph.buffer({.name = "seen", .size_bytes = 8, .space = sg::Space::pinned});
    graph.add({.name = "look", .lane = lane, .reads = x.range(0, 0), .writes = seen, .kind = sg::NodeKind::host},
              [] {});
    CHECK_NOTHROW(sg::Program(graph, world));  // uses no byte of x
    graph.add({.name = "read it", .lane = lane, .reads = {seen, x}, .kind = sg::NodeKind::host}, [] {});
    CHECK_THROWS_MATCHES(sg::Program(graph, world), sg::Error,
                         MessageMatches(ContainsSubstring("rank 0 host 'read it' is a host node, but its buffer 'x' is "
                                                          "in device memory, which the host cannot use in this world "
                                                          "(copy it to a buffer in pinned memory first)")));
    const auto found = sg::find_flaws(graph, {.world = &world, .waiting_lanes = 1});  // the verifier refuses it, too
    REQUIRE(found.size() == 1);
    CHECK(found[0].flaw == sg::Flaw::not_on_device);
    CHECK_THAT(found[0].message, ContainsSubstring("'read it' is a host node, but its buffer 'x'"));
    sg::LoopbackWorld loopback(1);  // its device memory is the host's
    CHECK_NOTHROW(sg::Executor({.threads = 1}).run(graph, loopback));
  }
  SECTION("a body that fails") {
    graph.add({.name = "mine", .writes = x, .device = true}, [] { throw std::runtime_error("out of ideas"); });
    sg::Executor executor({.threads = 1});
    const sg::Program program(graph, world);
    CHECK_THROWS_MATCHES(executor.run(program), sg::Error, MessageMatches(ContainsSubstring("'mine': out of ideas")));
    CHECK_FALSE(world.eager.good);
  }
}

TEST_CASE("a host node in a device program runs on the host, after its predecessors", "[engine][device]") {
  EagerWorld world(1);
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name       = "x",
                                     .size_bytes = 8,
                                     .type       = sg::DType::f64,
                                     .space      = sg::Space::pinned,
                                     .lifetime   = sg::Lifetime::persistent});
  graph.add({.name = "set", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .writes = x, .device = true},
            [](const sg::Context& context) { context.write<double>()[0] = 5; });
  double seen = 0;
  graph.add(
      {.name = "look", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::host), .reads = x, .kind = sg::NodeKind::host},
      [&seen](const sg::Context& context) {
        if (context.device() == nullptr) seen = context.read<double>()[0];
      });
  sg::Executor executor({.threads = 1, .waiting_lanes = 1});
  const sg::Program program(graph, world);
  executor.run(program);
  CHECK(seen == 5);
  CHECK(program.memory().span<double>(x)[0] == 5);  // visible to the host
}

TEST_CASE("a host node waits on a separate thread while a device program is issued", "[engine][device][threads]") {
  EagerWorld world(1);
  sg::Graph graph;
  const sg::Lane compute = graph.lane(sg::Rank{0}, sg::LaneKind::compute),
                 host    = graph.lane(sg::Rank{0}, sg::LaneKind::host);
  const auto buffer      = [&](const char* name) {
    return graph.buffer({.name = name, .size_bytes = 8, .space = sg::Space::pinned});
  };
  const sg::Buffer x = buffer("x"), y = buffer("y"), z = buffer("z");
  std::atomic<int> on_device{0};
  int seen = 0, seen_after = 0, at_the_end = 0;
  bool fails = false;
  graph.add({.name = "make x", .lane = compute, .writes = x, .device = true}, [&] { ++on_device; });
  graph.add({.name = "look", .lane = host, .reads = x, .writes = y, .kind = sg::NodeKind::host},
            [&](const sg::Context& c) {
              while (on_device < 3 && !c.stopping()) std::this_thread::yield();  // nodes it does not depend on continue
              seen = on_device;
              if (fails) throw std::runtime_error("no disk");
            });
  graph.add({.name = "look again", .lane = host, .reads = y, .kind = sg::NodeKind::host},
            [&] { seen_after = on_device; });
  for (int i = 0; i < 2; ++i)
    graph.add({.name = "other", .lane = compute, .writes = z, .device = true}, [&] { ++on_device; });
  graph.add({.name = "use y", .lane = compute, .reads = y, .device = true}, [&] { at_the_end = ++on_device; });
  const sg::Program program(graph, world);
  CHECK(program.num_waiting_lanes() == 1);
  CHECK_THROWS_MATCHES(sg::verify(graph, {.world = &world}), sg::Error,
                       MessageMatches(ContainsSubstring("too few workers: 1 lanes wait (rank 0 host)")));
  CHECK_NOTHROW(sg::verify(graph, {.world = &world, .waiting_lanes = 1}));
  sg::LoopbackWorld loopback(1);
  CHECK_NOTHROW(sg::verify(graph, {.world = &loopback}));  // there any thread runs a host node
  sg::Executor few({.threads = 1});
  CHECK_THROWS_MATCHES(few.run(program), sg::Error,
                       MessageMatches(ContainsSubstring("1 lanes that wait (rank 0 host)")));
  sg::Executor executor({.threads = 1, .waiting_lanes = 1, .step_timeout = std::chrono::seconds(20)});
  for (int run = 0; run < 3; ++run) {
    on_device = seen = seen_after = at_the_end = 0;
    executor.run(program);
    CHECK(seen == 3);
    CHECK(seen_after >= 3);
    CHECK(at_the_end == 4);  // after `look`
  }
  fails     = true;
  on_device = at_the_end = 0;
  CHECK_THROWS_MATCHES(executor.run(program), sg::Error,
                       MessageMatches(ContainsSubstring("rank 0 host 'look': no disk")));
  CHECK(at_the_end == 0);
  fails     = false;
  on_device = 0;
  executor.run(program);
  CHECK(at_the_end == 4);
}

TEST_CASE("a communication on a device waits for host nodes of every rank that takes part",
          "[engine][device][threads]") {
  EagerWorld world(2);
  sg::Graph graph(2);
  const sg::Group group = graph.group({.name = "both", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  std::vector<sg::Buffer> x;
  for (const sg::Rank rank : {sg::Rank{0}, sg::Rank{1}}) {
    x.push_back(graph.buffer({.name       = "x",
                              .rank       = rank,
                              .size_bytes = 8,
                              .type       = sg::DType::f64,
                              .space      = sg::Space::pinned,
                              .lifetime   = sg::Lifetime::persistent}));
  }
  graph.add({.name   = "read from disk",
             .lane   = graph.lane(sg::Rank{1}, sg::LaneKind::host),
             .writes = x[1],
             .kind   = sg::NodeKind::host},
            [](const sg::Context& c) {
              std::this_thread::sleep_for(std::chrono::milliseconds(20));
              c.write<double>()[0] = 5;
            });
  for (const sg::Rank rank : {sg::Rank{0}, sg::Rank{1}}) {
    graph.add({.name        = "sum",
               .lane        = graph.lane(rank, sg::LaneKind::reduce),
               .accumulates = x[static_cast<std::size_t>(index(rank))],
               .part        = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce, .type = sg::DType::f64},
               .kind        = sg::NodeKind::communicate});
  }
  const sg::Program program(graph, world);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1, .step_timeout = std::chrono::seconds(20)});
  program.memory().set_first(x[0], 1.0);
  executor.run(program);
  CHECK(program.memory().first<double>(x[0]) == 6);
}

TEST_CASE("a device program whose host node does not end stops at its time-out and names the node",
          "[engine][device]") {
  EagerWorld world(1);
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8, .space = sg::Space::pinned});
  graph.add(
      {.name = "look", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::host), .writes = x, .kind = sg::NodeKind::host},
      [](const sg::Context& c) {
        while (!c.stopping()) std::this_thread::yield();
      });
  bool used = false;
  graph.add({.name = "use", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .reads = x, .device = true},
            [&] { used = true; });
  const sg::Program program(graph, world);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1, .step_timeout = std::chrono::milliseconds(500)});
  CHECK_THROWS_MATCHES(executor.run(program), sg::Error, MessageMatches(ContainsSubstring("rank 0 host 'look'")));
  CHECK_FALSE(used);
}

namespace {

sg::Graph one_node() {
  sg::Graph graph;
  graph.add({.name = "work", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .device = true}, [] {});
  return graph;
}

}  // namespace

TEST_CASE("a thread that waits for a run on a device never looks at the next run", "[engine][device][threads]") {
  EagerWorld world(1);
  const sg::Program program(one_node(), world);
  sg::Executor executor({.threads = 1});
  // Only this thread sees the end of the first run. The second run ends with `over`.
  const std::thread::id here = std::this_thread::get_id();
  std::atomic<int> num_polls{0}, num_of_next{0};
  std::atomic<bool> over{false};
  world.eager.is_done = [&] {
    const bool mine = std::this_thread::get_id() == here;
    num_polls += !mine;
    num_of_next += !mine && world.eager.num_runs == 2;
    return world.eager.num_runs == 2 ? over || !mine : mine;
  };
  sg::Run first = executor.start(program);
  std::thread other([&] { first.get(); });
  while (num_polls == 0) std::this_thread::yield();
  sg::Run second = executor.start(program);
  other.join();  // although the second run goes on
  CHECK_FALSE(second.done());
  over = true;
  second.get();
  CHECK(num_of_next == 0);
}

TEST_CASE("a run on a device can be cancelled and run out of time after all nodes were issued",
          "[engine][device][cancel][timeout]") {
  EagerWorld world(1);
  const sg::Program program(one_node(), world);
  std::atomic<bool> done{false};
  std::atomic<int> num_polls{0};
  world.eager.is_done = [&] {
    ++num_polls;
    return done.load();
  };
  SECTION("cancelled") {
    sg::Executor executor({.threads = 1});
    sg::Run run = executor.start(program);
    while (num_polls == 0) CHECK_FALSE(run.done());  // does not wait for the device
    run.cancel("not needed");
    CHECK(world.num_aborts == 1);
    CHECK_THROWS_MATCHES(executor.start(program), sg::Error, MessageMatches(ContainsSubstring("still under way")));
    done = true;
    CHECK_THROWS_MATCHES(run.get(), sg::Error,
                         MessageMatches(ContainsSubstring("step: not needed; all nodes were issued, but the device was "
                                                          "not done")));
    CHECK_NOTHROW(executor.run(program));
  }
  SECTION("out of time, and the device never ends") {
    sg::Executor executor(
        {.threads = 1, .step_timeout = std::chrono::milliseconds(500), .drain_timeout = std::chrono::milliseconds(20)});
    CHECK_THROWS_MATCHES(
        executor.run(program), sg::Error,
        MessageMatches(ContainsSubstring("step: ran out of time after 500 ms; all nodes were issued") &&
                       ContainsSubstring("20 ms later these lanes of the device have not finished: "
                                         "rank 0 compute")));
    world.eager.forget();
  }
  SECTION("cancelled when the device is done") {
    sg::Executor executor({.threads = 1});
    sg::Run run = executor.start(program);
    while (num_polls == 0) CHECK_FALSE(run.done());
    done = true;
    run.cancel();
    CHECK_NOTHROW(run.get());
    CHECK(world.num_aborts == 0);
  }
}

namespace {

constexpr sg::ExecutorOptions short_drain{.threads = 1, .drain_timeout = std::chrono::milliseconds(20)};

// A world on a device that never finishes, and one that is left of it when the world is gone.
struct Endless {
  Endless() {
    world->eager.is_done = [this] {
      ++num_polls;
      return false;
    };
  }
  ~Endless() { device->forget(); }
  std::atomic<int> num_polls{0};
  std::unique_ptr<EagerWorld> world                = std::make_unique<EagerWorld>(1);
  std::shared_ptr<sg::testing::EagerDevice> device = world->shared_device();
};

}  // namespace

SCENARIO("a device never finishes a step", "[engine][device][timeout][cancel]") {
  Endless endless;
  EagerWorld& world = *endless.world;
  GIVEN("a step that is cancelled after all nodes were issued") {
    auto program  = std::make_unique<sg::Program>(one_node(), world);
    auto executor = std::make_unique<sg::Executor>(short_drain);
    auto run      = std::make_unique<sg::Run>(executor->start(*program));
    while (endless.num_polls == 0) CHECK_FALSE(run->done());
    run->cancel("not needed");
    THEN("get() names the lanes, and the device can run nothing more") {
      CHECK_THROWS_MATCHES(run->get(), sg::Error,
                           MessageMatches(ContainsSubstring("step: not needed; all nodes were issued") &&
                                          ContainsSubstring("these lanes of the device have not finished: rank 0")));
      CHECK(run->done());
      CHECK(world.num_ends == 1);
      CHECK_THROWS_MATCHES(
          executor->start(*program), sg::Error,
          MessageMatches(ContainsSubstring("still under way (the device has not finished rank 0 compute)")));
      CHECK_THROWS_MATCHES(sg::Executor({.threads = 1}).start(*program), sg::Error,
                           MessageMatches(ContainsSubstring("under way on another executor")));
      CHECK_THROWS_MATCHES(sg::Program(one_node(), world), sg::Error, MessageMatches(ContainsSubstring("abandoned")));
      AND_THEN("all objects can be destroyed, the world before the device") {
        run.reset();
        executor.reset();
        program.reset();
        endless.world.reset();
        CHECK(endless.device->kept.size() == 1);
      }
    }
    THEN("done() alone gives the device up after the drain time-out") {
      while (!run->done()) std::this_thread::yield();
      CHECK(endless.device->kept.size() == 1);
      CHECK_THROWS_MATCHES(run->get(), sg::Error, MessageMatches(ContainsSubstring("have not finished")));
    }
    THEN("the destructors return") {
      run.reset();
      executor.reset();
      CHECK(endless.device->kept.size() == 1);
    }
  }
  GIVEN("an executor that is destroyed while the device works") {
    const sg::Program program(one_node(), world);
    std::optional<sg::Run> run;
    {
      sg::Executor executor(short_drain);
      run.emplace(executor.start(program));
      while (endless.num_polls == 0) CHECK_FALSE(run->done());
    }
    CHECK_THROWS_MATCHES(run->get(), sg::Error,
                         MessageMatches(ContainsSubstring("its executor was destroyed") &&
                                        ContainsSubstring("have not finished: rank 0 compute")));
  }
  GIVEN("a host node that follows a node of the device") {
    sg::Graph graph    = one_node();
    const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8, .space = sg::Space::pinned});
    graph.add({.name = "make x", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .writes = x, .device = true},
              [] {});
    bool looked = false;
    graph.add(
        {.name = "look", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::host), .reads = x, .kind = sg::NodeKind::host},
        [&] { looked = true; });
    std::atomic<bool> asked{false};
    world.eager.is_ready = [&](sg::Node) {
      asked = true;
      return false;
    };
    const sg::Program program(graph, world);
    sg::Executor executor({.threads = 1, .waiting_lanes = 1, .drain_timeout = std::chrono::milliseconds(500)});
    sg::Run run = executor.start(program);
    while (!asked) std::this_thread::yield();
    run.cancel("not needed");
    CHECK_THROWS_MATCHES(run.get(), sg::Error,
                         MessageMatches(ContainsSubstring("not needed") && ContainsSubstring("'look'") &&
                                        ContainsSubstring("have not finished: rank 0 compute")));
    CHECK_FALSE(looked);
  }
}

TEST_CASE("a body that outlasts the drain time-out does not use up the time of the device",
          "[engine][device][timeout][cancel]") {
  EagerWorld world(1);
  std::atomic<bool> began{false}, go{false};
  std::atomic<int> num_polls{0};
  sg::Graph graph = one_node();
  graph.add({.name = "slow", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::host), .kind = sg::NodeKind::host}, [&] {
    began = true;
    while (!go) std::this_thread::yield();
  });
  // Not done at the first question after all bodies have ended.
  world.eager.is_done = [&] { return ++num_polls > 1; };
  const sg::Program program(graph, world);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1, .drain_timeout = std::chrono::seconds(2)});
  sg::Run run = executor.start(program);
  while (!began) std::this_thread::yield();
  run.cancel("not needed");
  CHECK_THROWS_MATCHES(run.get(), sg::Error, MessageMatches(ContainsSubstring("these nodes still run")));
  CHECK(num_polls == 0);
  go = true;
  while (num_polls < 2 && world.eager.kept.empty()) static_cast<void>(run.done());
  REQUIRE(world.eager.kept.empty());  // not abandoned
  CHECK_NOTHROW(executor.run(program));
}

TEST_CASE("a device that cannot say what it has not finished is given up all the same", "[engine][device][timeout]") {
  Endless endless;
  endless.world->eager.unfinished_fails = true;
  const sg::Program program(one_node(), *endless.world);
  sg::Executor executor(short_drain);
  sg::Run run = executor.start(program);
  while (endless.num_polls == 0) CHECK_FALSE(run.done());
  run.cancel("not needed");
  CHECK_THROWS_MATCHES(run.get(), sg::Error, MessageMatches(ContainsSubstring("its work was still not done")));
  CHECK(endless.device->kept.size() == 1);
}

TEST_CASE("a program waits until a device has no work of another program, and a time-out ends that",
          "[engine][device][timeout]") {
  EagerWorld world(1);
  std::atomic<bool> vacant{false};
  world.eager.is_vacant = [&] { return vacant.load(); };
  const sg::Program program(one_node(), world);
  sg::Executor executor({.threads = 1, .step_timeout = std::chrono::milliseconds(20)});
  CHECK_THROWS_MATCHES(executor.run(program), sg::Error, MessageMatches(ContainsSubstring("ran out of time")));
  CHECK(world.eager.num_runs == 0);
  vacant = true;
  CHECK_NOTHROW(sg::Executor({.threads = 1}).run(program));
  CHECK(world.eager.num_runs == 1);
}

TEST_CASE("peers are told of a device that fails after all nodes were issued", "[engine][device][errors]") {
  EagerWorld world(1);
  const sg::Program program(one_node(), world);
  world.eager.is_done = []() -> bool { throw sg::Error(sg::ErrorKind::backend, "eager: a kernel has failed"); };
  sg::Executor executor({.threads = 1});
  CHECK_THROWS_MATCHES(executor.run(program), sg::Error, MessageMatches(ContainsSubstring("a kernel has failed")));
  CHECK(world.num_aborts == 1);
  CHECK(world.num_ends == 1);
}

TEST_CASE("a device that does no more nodes stalls, one that cannot count them does not", "[engine][device][timeout]") {
  EagerWorld world(1);
  const sg::Program program(one_node(), world);
  sg::Executor executor({.threads = 1, .stall_timeout = std::chrono::milliseconds(1000)});
  std::atomic<int> num_polls{0};
  // It begins with the first question, when all nodes were issued.
  std::optional<std::chrono::steady_clock::time_point> begin;
  world.eager.is_done = [&] {
    if (!begin) begin = std::chrono::steady_clock::now();
    return std::chrono::steady_clock::now() - *begin > std::chrono::milliseconds(1500);
  };
  SECTION("it counts and goes on") {
    world.eager.count = [&]() -> std::optional<std::uint64_t> { return ++num_polls; };
    CHECK_NOTHROW(executor.run(program));
  }
  SECTION("it cannot count") { CHECK_NOTHROW(executor.run(program)); }
  SECTION("it stands still") {
    world.eager.is_done = [&] { return world.num_aborts > 0; };
    world.eager.count   = []() -> std::optional<std::uint64_t> { return 0; };
    CHECK_THROWS_MATCHES(executor.run(program), sg::Error,
                         MessageMatches(ContainsSubstring("step: no node has ended for 1000 ms")));
  }
}
