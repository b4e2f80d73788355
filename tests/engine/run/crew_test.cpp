#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/graph/graph.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/allocations.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

TEST_CASE("a thread that runs out of nodes joins a kernel that started while all were busy",
          "[engine][executor][threads]") {
  sg::Graph graph;
  std::atomic<int> inside{0};
  std::atomic<bool> busy{false};
  // Both tiles wait for each other. Another node holds the second thread until the first tile runs.
  graph.add({.name = "other"}, [&](const sg::Context& c) {
    busy = true;
    while (inside < 1 && !c.stopping()) std::this_thread::yield();
    std::this_thread::sleep_for(5ms);  // a thread that was asked at once has given up by now
  });
  graph.add({.name = "kernel", .parallel = true}, [&](const sg::Context& c) {
    while (!busy && !c.stopping()) std::this_thread::yield();
    c.parallel_for(2, [&](std::int64_t) {
      ++inside;
      while (inside < 2 && !c.stopping()) std::this_thread::yield();
    });
  });
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2, .step_timeout = 20s});
  for (int run = 0; run < 3; ++run) {
    inside = 0;
    busy   = false;
    executor.run(graph, world);
    CHECK(inside == 2);
  }
}

TEST_CASE("a ready node starts although all other threads help with a kernel", "[engine][executor][threads]") {
  // The kernel goes on until two nodes run that wait for each other. They become ready when the third thread helps.
  sg::Graph graph(2);
  std::atomic<bool> helped{false};
  std::atomic<int> together{0};
  const auto both_run = [&](const sg::Context& c) {
    ++together;
    while (together < 2 && !c.stopping()) std::this_thread::yield();
  };
  graph.add({.name = "kernel", .parallel = true, .rank = sg::Rank{0}}, [&](const sg::Context& c) {
    const auto thread = std::this_thread::get_id();
    c.parallel_for(1 << 20, [&](std::int64_t) {
      if (std::this_thread::get_id() != thread) helped = true;
      if (together < 2 && !c.stopping()) std::this_thread::sleep_for(100us);
    });
  });
  const auto done = graph.token(sg::Rank{1}, "done");
  graph.add({.name = "before", .writes = {done}, .rank = sg::Rank{1}}, [&](const sg::Context& c) {
    while (!helped && !c.stopping()) std::this_thread::yield();
  });
  graph.add({.name = "one", .reads = {done}, .rank = sg::Rank{1}}, both_run);
  graph.add({.name = "other", .reads = {done}, .rank = sg::Rank{1}}, both_run);
  sg::LoopbackWorld world(2);
  sg::Executor executor({.threads = 3, .step_timeout = 20s});
  for (int run = 0; run < 3; ++run) {
    helped   = false;
    together = 0;
    executor.run(graph, world);
    CHECK(together == 2);
  }
}

TEST_CASE("only the threads of an executor compute for several ranks", "[engine][executor][threads]") {
  // Each kernel goes on until it has help.
  constexpr int num_threads = 3, num_ranks = 2, num_kernels = 5;
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::atomic<int> num_helped{0};
  sg::Graph graph(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto lane = graph.lane(sg::Rank{rank}, sg::LaneKind::compute);
    for (int kernel = 0; kernel < num_kernels; ++kernel) {
      graph.add({.name = "kernel", .lane = lane, .parallel = true}, [&](const sg::Context& c) {
        const auto own = std::this_thread::get_id();
        std::atomic<bool> helped{false};
        c.parallel_for(1 << 14, [&](std::int64_t) {
          if (helped || c.stopping()) return;
          const auto thread = std::this_thread::get_id();
          {
            const std::lock_guard lock(mutex);
            threads.insert(thread);
          }
          if (thread != own) helped = true;
          if (!helped) std::this_thread::sleep_for(200us);
        });
        if (helped) ++num_helped;
      });
    }
  }
  sg::LoopbackWorld world(num_ranks);
  sg::Executor executor({.threads = num_threads, .step_timeout = 20s});
  for (int run = 0; run < 3; ++run) executor.run(graph, world);
  CHECK(threads.size() <= num_threads);
  CHECK(num_helped == 3 * num_ranks * num_kernels);
}

TEST_CASE("workers return to a kernel that they left for nodes of another rank", "[engine][executor][threads]") {
  // In each round two nodes wait for each other, so the helper leaves the kernel for one of them. The next node waits
  // for a helped tile. The kernel goes on until the last round is over.
  constexpr int num_rounds = 30;
  std::atomic<int> helped{0}, arrived{0}, done{0};
  sg::Graph graph(2);
  graph.add({.name = "kernel", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .parallel = true},
            [&](const sg::Context& c) {
              const auto own = std::this_thread::get_id();
              c.parallel_for(1 << 20, [&](std::int64_t) {
                if (std::this_thread::get_id() != own) ++helped;
                if (done < num_rounds && !c.stopping()) std::this_thread::sleep_for(50us);
              });
            });
  const auto token = [&](const char* name) { return graph.token(sg::Rank{1}, name); };
  sg::Buffer begin = token("begin");
  graph.add({.name = "first", .writes = {begin}, .rank = sg::Rank{1}}, [](const sg::Context&) {});
  for (int round = 0; round < num_rounds; ++round) {
    const sg::Buffer one = token("one"), other = token("other"), end = token("end");
    for (const sg::Buffer& to : {one, other}) {
      graph.add({.name = "pair", .reads = {begin}, .writes = {to}, .rank = sg::Rank{1}},
                [&, round](const sg::Context& c) {
                  ++arrived;
                  while (arrived < 2 * (round + 1) && !c.stopping()) std::this_thread::yield();
                });
    }
    graph.add({.name = "helped", .reads = {one, other}, .writes = {end}, .rank = sg::Rank{1}},
              [&](const sg::Context& c) {
                const int before = helped;
                while (helped == before && !c.stopping()) std::this_thread::yield();
                ++done;
              });
    begin = end;
  }
  sg::LoopbackWorld world(2);
  sg::Executor executor({.threads = 3, .step_timeout = 20s});
  executor.run(graph, world);
  CHECK(done == num_rounds);
}

TEST_CASE("an error in a tile that a helping worker computes is that of the kernel, and the program runs again",
          "[engine][executor][errors]") {
  sg::Graph graph(2);
  std::atomic<bool> fails{true}, failed{false};
  std::atomic<int> done{0};
  graph.add({.name = "kernel", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .parallel = true},
            [&](const sg::Context& c) {
              const auto own = std::this_thread::get_id();
              c.parallel_for(1 << 20, [&](std::int64_t) {
                ++done;
                if (fails && std::this_thread::get_id() != own) {
                  failed = true;
                  throw sg::Error(sg::ErrorKind::run, "no luck");
                }
                if (fails && !failed && !c.stopping()) std::this_thread::sleep_for(50us);
              });
            });
  graph.add({.name = "other", .lane = graph.lane(sg::Rank{1}, sg::LaneKind::compute)}, [](const sg::Context&) {});
  sg::LoopbackWorld world(2);
  sg::Program program(graph, world);
  sg::Executor executor({.threads = 2, .step_timeout = 20s});
  for (int run = 0; run < 3; ++run) {
    fails  = true;
    failed = false;
    CHECK_THROWS_MATCHES(executor.run(program), sg::Error,
                         MessageMatches(ContainsSubstring("'kernel'") && ContainsSubstring("no luck")));
    fails = false;
    done  = 0;
    executor.run(program);
    CHECK(done == 1 << 20);
  }
}

TEST_CASE("programs of one and of several ranks, in turn on executors of several sizes, run all tiles",
          "[engine][executor][threads]") {
  constexpr int num_kernels = 12, num_tiles = 64;
  std::atomic<int> done{0};
  const auto graph_of = [&](int num_ranks) {
    sg::Graph graph(num_ranks);
    for (int kernel = 0; kernel < num_kernels; ++kernel) {
      graph.add(
          {.name = "kernel", .lane = graph.lane(sg::Rank{kernel % num_ranks}, sg::LaneKind::compute), .parallel = true},
          [&](const sg::Context& c) { c.parallel_for(num_tiles, [&](std::int64_t) { ++done; }); });
    }
    return graph;
  };
  const sg::Graph one = graph_of(1), several = graph_of(3);
  sg::LoopbackWorld world_of_one(1), world_of_several(3);
  sg::Program first(one, world_of_one), second(several, world_of_several);
  for (int round = 0; round < sg::testing::cases(20); ++round) {
    for (const int threads : {2, 5, 3}) {
      sg::Executor executor({.threads = threads});
      for (const sg::Program* program : {&first, &second, &first, &second}) {
        done = 0;
        executor.run(*program);
        REQUIRE(done == num_kernels * num_tiles);
      }
    }
  }
}

TEST_CASE("helpers join each of a chain of short kernels, and end with their executor", "[engine][executor][threads]") {
  constexpr int num_kernels = 50;
  std::atomic<int> inside{0}, helped{0};
  sg::Graph graph;
  const sg::Lane lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  for (int kernel = 0; kernel < num_kernels; ++kernel) {
    graph.add({.name = "kernel", .lane = lane, .parallel = true}, [&, kernel](const sg::Context& c) {
      std::atomic<int> others{0};
      const auto own = std::this_thread::get_id();
      // Both tiles wait for each other, so one thread cannot run both.
      c.parallel_for(2, [&](std::int64_t) {
        ++inside;
        while (inside < 2 * (kernel + 1) && !c.stopping()) std::this_thread::yield();
        others += std::this_thread::get_id() != own;
      });
      helped += others == 1;
    });
  }
  sg::LoopbackWorld world(1);
  for (int run = 0; run < sg::testing::cases(20); ++run) {
    inside = helped = 0;
    sg::Executor({.threads = 2, .step_timeout = 20s}).run(graph, world);  // destroyed while a helper is still awake
    REQUIRE(helped == num_kernels);
  }
}

TEST_CASE("kernels of many nodes at once run every tile once", "[engine][executor][threads]") {
  constexpr int num_nodes = 64, num_tiles = 23;
  const int num_ranks = GENERATE(1, 4);
  CAPTURE(num_ranks);
  std::vector<std::atomic<int>> counts(num_nodes * num_tiles);
  sg::Graph graph(num_ranks);
  for (int node = 0; node < num_nodes; ++node) {
    graph.add(
        {.name = "kernel", .parallel = true, .rank = sg::Rank{node % num_ranks}}, [&, node](const sg::Context& c) {
          c.parallel_for(num_tiles, [&](std::int64_t i) { ++counts[static_cast<std::size_t>(node * num_tiles + i)]; });
        });
  }
  sg::LoopbackWorld world(num_ranks);
  for (const int threads : {1, 2, 3, 8}) {
    sg::Executor executor({.threads = threads});
    const int runs = sg::testing::cases(40);
    for (auto& count : counts) count = 0;
    for (int run = 0; run < runs; ++run) executor.run(graph, world);
    int wrong = 0;
    for (const auto& count : counts) wrong += count != runs;
    CHECK(wrong == 0);
  }
}

TEST_CASE("adjacent tiles come in pairs while all threads have their own work, and singly otherwise",
          "[engine][executor][threads]") {
  constexpr int num_tiles = 7;
  std::vector<int> counts(num_tiles);
  std::vector<std::int64_t> sizes;
  std::mutex mutex;
  const auto kernel = [&](const sg::Context& c) {
    c.parallel_for(num_tiles, 1, [&](std::int64_t first, std::int64_t end) {
      const std::lock_guard lock(mutex);
      sizes.push_back(end - first);
      for (std::int64_t i = first; i < end; ++i) ++counts[static_cast<std::size_t>(i)];
    });
  };
  sg::Graph busy, idle;
  std::atomic<bool> other_runs{false}, done{false};
  busy.add({.name = "other"}, [&](const sg::Context& c) {
    other_runs = true;
    while (!done && !c.stopping()) std::this_thread::yield();
  });
  busy.add({.name = "kernel", .parallel = true}, [&](const sg::Context& c) {
    while (!other_runs && !c.stopping()) std::this_thread::yield();
    kernel(c);
    done = true;
  });
  idle.add({.name = "kernel", .parallel = true}, kernel);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2, .step_timeout = 20s});
  executor.run(busy, world);
  CHECK(sizes == std::vector<std::int64_t>{2, 2, 2, 1});
  sizes.clear();
  executor.run(idle, world);
  CHECK(sizes == std::vector<std::int64_t>(num_tiles, 1));
  CHECK(counts == std::vector<int>(num_tiles, 2));
  sizes.clear();
  sg::Executor({.threads = 1}).run(idle, world);
  CHECK(sizes == std::vector<std::int64_t>{num_tiles});  // no thread could help
}

namespace {

// Runs a kernel whose tiles may be joined to halves, and adds the sizes of its calls.
void record_calls(const sg::Context& context, std::int64_t num_tiles, std::vector<std::int64_t>& sizes) {
  std::mutex mutex;
  context.parallel_for(num_tiles, num_tiles / 2, [&](std::int64_t first, std::int64_t end) {
    const std::lock_guard lock(mutex);
    sizes.push_back(end - first);
  });
}

void run_on_four(const sg::Graph& graph) {
  sg::LoopbackWorld world(1);
  sg::Executor({.threads = 4, .step_timeout = 20s}).run(graph, world);
}

}  // namespace

TEST_CASE("a kernel that begins while another one runs is cut for the threads that it will get",
          "[engine][executor][threads]") {
  constexpr int num_tiles = 64;
  std::vector<std::int64_t> sizes;
  std::atomic<int> running{0};
  std::atomic<bool> done{false};
  const auto until = [&](int number, const sg::Context& c) {
    while (running < number && !c.stopping()) std::this_thread::yield();
  };
  const auto until_done = [&](const sg::Context& c) {
    ++running;
    while (!done && !c.stopping()) std::this_thread::yield();
  };
  // Four nodes have all permits, so no helper comes.
  sg::Graph graph;
  graph.add({.name = "other"}, until_done);
  graph.add({.name = "another"}, until_done);
  graph.add({.name = "long kernel", .parallel = true}, [&](const sg::Context& c) {
    until(3, c);
    c.parallel_for(2, [&](std::int64_t) { until_done(c); });
  });
  graph.add({.name = "kernel", .parallel = true}, [&](const sg::Context& c) {
    ++running;
    until(4, c);
    record_calls(c, num_tiles, sizes);
    done = true;
  });
  run_on_four(graph);
  // Twice its part of the threads.
  CHECK(sizes == std::vector<std::int64_t>{8, 4, 2, 1, 1, 8, 4, 2, 1, 1, 8, 4, 2, 1, 1, 8, 4, 2, 1, 1});
}

TEST_CASE("a kernel that begins beside another one while threads are free is cut for its part of them",
          "[engine][executor][threads]") {
  constexpr int num_tiles = 64;
  std::vector<std::int64_t> sizes;
  std::atomic<int> inside{0};
  std::atomic<bool> done{false};
  const auto until = [](const std::atomic<bool>& is, const sg::Context& c) {
    while (!is && !c.stopping()) std::this_thread::yield();
  };
  sg::Graph graph;
  graph.add({.name = "long kernel", .parallel = true}, [&](const sg::Context& c) {
    c.parallel_for(2, [&](std::int64_t) {
      ++inside;
      until(done, c);  // `kernel` does not wait for a slot among TBB's threads, all of which may be here
    });
  });
  graph.add({.name = "kernel", .parallel = true}, [&](const sg::Context& c) {
    while (inside < 2 && !c.stopping()) std::this_thread::yield();
    record_calls(c, num_tiles, sizes);
    done = true;
  });
  run_on_four(graph);
  std::sort(sizes.begin(), sizes.end());
  CHECK(sizes == std::vector<std::int64_t>{2, 2, 2, 2, 4, 4, 8, 8, 16, 16});
}

TEST_CASE("the thread of a kernel that waits for its last helper works on other kernels",
          "[engine][executor][threads]") {
  std::atomic<bool> long_runs{false}, owner_runs{false}, short_runs{false}, helped{false}, last_runs{false},
      done{false};
  const auto until = [](const std::atomic<bool>& is, const sg::Context& c) {
    while (!is && !c.stopping()) std::this_thread::yield();
  };
  // Four nodes have all permits. When the last one ends, a helper takes its permit and the second tile of `kernel`.
  sg::Graph graph;
  graph.add({.name = "long kernel", .parallel = true}, [&](const sg::Context& c) {
    const std::thread::id first = std::this_thread::get_id();
    c.parallel_for(2, [&](std::int64_t) {
      long_runs = true;
      if (std::this_thread::get_id() != first) return until(owner_runs, c);
      owner_runs = true;
      until(done, c);
    });
  });
  std::thread::id own;
  graph.add({.name = "kernel", .parallel = true}, [&](const sg::Context& c) {
    own = std::this_thread::get_id();
    until(long_runs, c);
    c.parallel_for(2, [&](std::int64_t) {
      if (std::this_thread::get_id() == own) {
        short_runs = true;
        until(helped, c);
        until(last_runs, c);
      } else {
        helped = true;
        until(done, c);
      }
    });
  });
  // Only the thread of `kernel` is left for one of its tiles.
  std::thread::id helper;
  graph.add({.name = "last kernel", .parallel = true}, [&](const sg::Context& c) {
    const std::thread::id last = std::this_thread::get_id();
    until(helped, c);
    c.parallel_for(2, [&](std::int64_t) {
      if (std::this_thread::get_id() != last) {
        helper = std::this_thread::get_id();
        done   = true;
      }
      last_runs = true;
      until(done, c);
    });
  });
  graph.add({.name = "other"}, [&](const sg::Context& c) { until(short_runs, c); });
  run_on_four(graph);
  CHECK(helper == own);
}

TEST_CASE("a thread's share of tiles that may be joined is computed in calls that become smaller",
          "[engine][executor][threads]") {
  struct Case {
    int threads, num_tiles, joined;
    std::vector<std::int64_t> sizes;
  };
  for (const Case& of :
       {Case{2, 64, 32, {32, 32}},
        {2, 64, 16, {16, 16, 16, 16}},
        {3, 64, 32, {1, 1, 1, 1, 1, 1, 3, 3, 3, 5, 6, 6, 10, 11, 11}},
        {4, 64, 16, {1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8}},
        {4, 64, 12, {1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8}},
        {4, 128, 32, {2, 2, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 16, 16, 16, 16}},
        {4, 64, 4, {1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}},
        {8, 64, 16, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4}},
        {1, 64, 16, {64}},
        {2, 2, 1, {1, 1}},
        {8, 3, 2, {1, 1, 1}}}) {
    CAPTURE(of.threads, of.num_tiles, of.joined);
    std::vector<int> counts(static_cast<std::size_t>(of.num_tiles));
    std::vector<std::int64_t> sizes;
    std::mutex mutex;
    sg::Graph graph;
    graph.add({.name = "kernel", .parallel = true}, [&](const sg::Context& c) {
      c.parallel_for(of.num_tiles, of.joined, [&](std::int64_t first, std::int64_t end) {
        const std::lock_guard lock(mutex);
        sizes.push_back(end - first);
        for (std::int64_t i = first; i < end; ++i) ++counts[static_cast<std::size_t>(i)];
      });
    });
    sg::LoopbackWorld world(1);
    sg::Executor({.threads = of.threads}).run(graph, world);
    std::sort(sizes.begin(), sizes.end());
    CHECK(sizes == of.sizes);
    CHECK(counts == std::vector<int>(static_cast<std::size_t>(of.num_tiles), 1));
  }
}

TEST_CASE("a step's nodes and kernels allocate nothing with operator new", "[engine][executor]") {
  if (!sg::testing::counts_allocations()) SKIP("sanitizers have allocators of their own");
  const int num_ranks = GENERATE(1, 2);
  CAPTURE(num_ranks);
  const auto allocations_of_run = [num_ranks](int num_nodes) {
    sg::Graph graph(num_ranks);
    for (int node = 0; node < num_nodes; ++node) {
      const sg::Lane lane = graph.lane(sg::Rank{node % num_ranks}, sg::LaneKind::compute);
      graph.add({.name = "kernel", .lane = lane, .parallel = true},
                [](const sg::Context& c) { c.parallel_for(4, [](std::int64_t) {}); });
    }
    sg::LoopbackWorld world(num_ranks);
    sg::Program program(graph, world);
    sg::Executor executor({.threads = 2});
    for (int run = 0; run < 10; ++run) executor.run(program);
    const std::int64_t before = sg::testing::allocations();
    executor.run(program);
    return sg::testing::allocations() - before;
  };
  CHECK(allocations_of_run(1000) == allocations_of_run(10));  // only the cost of starting a run
}
