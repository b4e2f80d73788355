#include "engine/run/executor.hpp"

#include <atomic>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/verify/verify.hpp"
#include "tests/support/executor_tests.hpp"

namespace sg = stepgraph;
using namespace sg::testing::executor_tests;

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
    const std::string error = error_of([&] { sg::Program(graph, world); });
    if (same) CHECK_THAT(error, ContainsSubstring("two groups of the same ranks have the name 'pair'"));
    if (!same) CHECK(error == "");
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
