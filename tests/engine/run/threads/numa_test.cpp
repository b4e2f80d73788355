// Threads of an executor on described NUMA nodes: each of the first two processors is one.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/graph.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/threads/affinity.hpp"
#include "engine/run/threads/first_touch.hpp"
#include "engine/run/threads/helper_threads.hpp"
#include "tests/support/variable.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Processors = std::vector<int>;

namespace {

Processors here() { return sg::Affinity::of_thread(0).processors(); }

// STEPGRAPH_NUMA with two nodes of a processor each. Skips the test where the process may use only one.
struct TwoNodes {
  TwoNodes() {
    if (allowed.size() < 2) SKIP("needs 2 processors, and this process may use " << allowed.size());
  }
  [[nodiscard]] Processors node(int number) const { return {allowed[static_cast<std::size_t>(number)]}; }

  Processors allowed = sg::allowed_processors();
  sg::testing::Variable numa{"STEPGRAPH_NUMA", sg::str(allowed.front(), "/", allowed[allowed.size() > 1 ? 1 : 0])};
};

// Adds a parallel node with two tiles that wait for each other, so each has a thread. They write where they run.
void add_pair(sg::Graph& graph, sg::Rank rank, std::vector<Processors>& tiles) {
  graph.add({.name = "pair", .lane = graph.lane(rank, sg::LaneKind::compute), .parallel = true},
            [&tiles, inside = std::make_shared<std::atomic<int>>(0)](const sg::Context& c) {
              *inside = 0;
              c.parallel_for(2, [&](std::int64_t i) {
                tiles[static_cast<std::size_t>(i)] = here();
                ++*inside;
                while (*inside < 2 && !c.stopping()) std::this_thread::yield();
              });
            });
}

// Where TBB's thread runs for work of an executor without NUMA nodes.
Processors probe_helper() {
  struct Probe {
    Processors found;
    std::atomic<bool> done{false};
  } probe;
  const sg::NumaPlaces places(2);
  sg::HelperThreads threads(places);
  const auto look = [](void* of, int) {
    static_cast<Probe*>(of)->found = here();
    static_cast<Probe*>(of)->done  = true;
  };
  threads.enqueue(0, look, &probe, 1);
  while (!probe.done) std::this_thread::yield();
  return probe.found;
}

}  // namespace

TEST_CASE("the nodes of each rank run on the processors of its NUMA node", "[engine][executor][numa]") {
  const TwoNodes machine;
  const int num_ranks = GENERATE(2, 4), threads = GENERATE(2, 3, 4);
  CAPTURE(num_ranks, threads);
  constexpr int num_nodes = 20;
  std::vector<std::vector<Processors>> found(static_cast<std::size_t>(num_ranks), std::vector<Processors>(num_nodes));
  sg::Graph graph(num_ranks);
  for (int i = 0; i < num_nodes; ++i) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      graph.add({.name = "look", .lane = graph.lane(sg::Rank{rank}, sg::LaneKind::compute)},
                [&, rank, i] { found[static_cast<std::size_t>(rank)][static_cast<std::size_t>(i)] = here(); });
    }
  }
  sg::LoopbackWorld world(num_ranks);
  sg::Executor executor({.threads = threads, .step_timeout = 30s});
  executor.run(graph, world);
  for (int rank = 0; rank < num_ranks; ++rank) {
    CAPTURE(rank);
    CHECK(found[static_cast<std::size_t>(rank)] ==
          std::vector<Processors>(num_nodes, machine.node(rank < num_ranks / 2 ? 0 : 1)));
  }
  CHECK(here() == machine.allowed);  // the calling thread is not bound
}

TEST_CASE("without a number of threads, an executor has one for each processor of the NUMA nodes",
          "[engine][executor][numa]") {
  const TwoNodes machine;
  CHECK(sg::Executor().threads() == 2);
  const sg::testing::Variable one("STEPGRAPH_NUMA", sg::str(machine.allowed[1]));
  CHECK(sg::Executor().threads() == 1);
}

TEST_CASE("the helpers of a kernel run on the NUMA node of its rank", "[engine][executor][numa]") {
  const TwoNodes machine;
  constexpr int num_kernels = 10;
  sg::LoopbackWorld world(2);
  sg::Executor executor({.threads = 4, .step_timeout = 30s});
  for (const int rank : {0, 1, 0, 1}) {
    CAPTURE(rank);
    std::vector<std::vector<Processors>> found(num_kernels, std::vector<Processors>(2));
    sg::Graph graph(2);
    for (std::vector<Processors>& tiles : found) add_pair(graph, sg::Rank{rank}, tiles);
    executor.run(graph, world);
    for (const std::vector<Processors>& tiles : found) CHECK(tiles == std::vector<Processors>(2, machine.node(rank)));
  }
}

TEST_CASE("a share of the kernels of one rank on two NUMA nodes is always on the same node",
          "[engine][executor][numa]") {
  const TwoNodes machine;
  constexpr int num_kernels = 30;
  std::vector<std::vector<Processors>> found(num_kernels, std::vector<Processors>(2));
  sg::Graph graph;
  for (int i = 0; i < num_kernels; ++i) add_pair(graph, sg::Rank{0}, found[static_cast<std::size_t>(i)]);
  sg::LoopbackWorld world(1);
  const sg::Program program(graph, world);
  for (int run = 0; run < 3; ++run) {
    sg::Executor executor({.threads = 2, .step_timeout = 30s});
    executor.run(program);
    for (int i = 0; i < num_kernels; ++i) {
      CAPTURE(run, i);
      CHECK(found[static_cast<std::size_t>(i)] == std::vector<Processors>{machine.node(0), machine.node(1)});
    }
  }
}

TEST_CASE("a communication between ranks on two NUMA nodes adds what it should", "[engine][executor][numa]") {
  const TwoNodes machine;
  constexpr std::size_t count = 1 << 18;
  sg::Graph graph(2);
  const sg::Group group = graph.group({.name = "both", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  std::vector<sg::Buffer> sums;
  for (int rank = 0; rank < 2; ++rank) {
    sums.push_back(graph.buffer({.name       = "x",
                                 .rank       = sg::Rank{rank},
                                 .size_bytes = count * sizeof(float),
                                 .type       = sg::DType::f32,
                                 .lifetime   = sg::Lifetime::persistent}));
    graph.add({.name        = "sum",
               .lane        = graph.lane(sg::Rank{rank}, sg::LaneKind::reduce),
               .accumulates = {sums.back()},
               .part        = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce, .type = sg::DType::f32}});
  }
  sg::LoopbackWorld world(2);
  const sg::Program program(graph, world);
  for (int rank = 0; rank < 2; ++rank)
    std::ranges::fill(program.memory().span<float>(sums[static_cast<std::size_t>(rank)]), rank == 0 ? 1.0f : 3.0f);
  sg::Executor executor({.threads = 2, .step_timeout = 30s});
  executor.run(program);
  executor.run(program);
  for (const sg::Buffer sum : sums) CHECK(std::ranges::count(program.memory().span<float>(sum), 8.0f) == count);
}

TEST_CASE("threads that TBB starts for a bound thread are bound in its arena alone", "[engine][executor][numa]") {
  const TwoNodes machine;
  Processors other, after;
  sg::Graph graph(2);
  // The first call of a kernel is on a bound thread.
  graph.add({.name = "probe", .rank = sg::Rank{1}}, [&] { other = probe_helper(); });
  std::vector<Processors> tiles(2);
  add_pair(graph, sg::Rank{1}, tiles);
  sg::LoopbackWorld world(2);
  for (int run = 0; run < 5; ++run) {
    {
      sg::Executor executor({.threads = 4, .step_timeout = 30s});
      executor.run(graph, world);
    }  // TBB's thread may still be in its arena
    CHECK(other == machine.allowed);
    CHECK(tiles == std::vector<Processors>(2, machine.node(1)));
    CHECK(probe_helper() == machine.allowed);
  }
}

TEST_CASE("a body that fails on a NUMA node stops the step, and the next one runs", "[engine][executor][numa]") {
  const TwoNodes machine;
  std::atomic<bool> fails{true};
  std::atomic<int> done{0};
  sg::Graph graph(2);
  for (int rank = 0; rank < 2; ++rank) {
    graph.add({.name = "kernel", .parallel = true, .rank = sg::Rank{rank}}, [&, rank](const sg::Context& c) {
      c.parallel_for(8, [&](std::int64_t i) {
        if (rank == 1 && i == 5 && fails) throw sg::Error(sg::ErrorKind::run, "tile 5");
        ++done;
      });
    });
  }
  sg::LoopbackWorld world(2);
  sg::Executor executor({.threads = 4, .step_timeout = 30s});
  CHECK_THROWS_AS(executor.run(graph, world), sg::Error);
  fails = false;
  done  = 0;
  executor.run(graph, world);
  CHECK(done == 16);
}

TEST_CASE("memory has all its pages, zeroed, when it is made for NUMA nodes", "[engine][numa]") {
  const TwoNodes machine;
  const int num_ranks = GENERATE(1, 2);
  CAPTURE(num_ranks);
  constexpr std::int64_t size = 3 << 20;
  sg::Graph graph(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank)
    (void)graph.buffer({.name = "x", .rank = sg::Rank{rank}, .size_bytes = size, .lifetime = sg::Lifetime::persistent});
  const sg::Memory memory(graph);
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::span<std::byte> arena = memory.arena(sg::Rank{rank});
    REQUIRE(arena.size() >= static_cast<std::size_t>(size));
    std::vector<unsigned char> resident((arena.size() + page - 1) / page);
    REQUIRE(mincore(arena.data(), arena.size(), resident.data()) == 0);
    CHECK(std::ranges::all_of(resident, [](unsigned char each) { return (each & 1) != 0; }));
    CHECK(arena[0] == std::byte{0});
    CHECK(std::memcmp(arena.data(), arena.data() + 1, arena.size() - 1) == 0);
  }
}
