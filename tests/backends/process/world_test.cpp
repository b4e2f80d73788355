#include "backends/process/message_world.hpp"

#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>
#include <functional>
#include <thread>

#include "backends/process/agreement.hpp"
#include "backends/process/flight.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "tests/backends/process/processes.hpp"
#include "tests/support/conformance/one_collective.hpp"
#include "tests/support/conformance/world_conformance.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/worlds/memory_network.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::Rank;
using sg::RankSet;
using sg::testing::MemoryLetters;
using sg::testing::MemoryNetwork;
using sg::testing::Places;
using sg::testing::run_processes;

namespace {

sg::ProcessWorldOptions quiet(std::vector<std::string>* lines = nullptr, int process = 0) {
  sg::ProcessWorldOptions options{.timeout = 20s * sg::testing::slowness()};
  options.on_failure = [=](const sg::Verdict&, const std::string& line) {
    if (lines != nullptr) (*lines)[static_cast<std::size_t>(process)] = line;
  };
  options.on_overdue = [] {};
  return options;
}

auto over(MemoryLetters& letters) {
  return [&letters](sg::Job&, const sg::ProcessWorld::Hooks&) { return std::make_unique<MemoryNetwork>(letters); };
}

std::vector<std::string> nothing(int size) { return std::vector<std::string>(static_cast<std::size_t>(size)); }

// An all-reduce, as the slice of one rank. `before` runs before it.
sg::Graph ring(int size, Rank rank, std::int64_t bytes, const std::function<void(const sg::Context&)>& before = {}) {
  sg::Graph graph(size, rank);
  std::vector<Rank> all;
  for (int i = 0; i < size; ++i) all.push_back(Rank{i});
  const sg::Group group   = graph.group({.name = "all", .ranks = all});
  const sg::Buffer buffer = graph.buffer({.name = "sum", .rank = rank, .size_bytes = bytes, .type = sg::DType::f32});
  if (before)
    graph.add({.name = "before", .lane = graph.lane(rank, sg::LaneKind::compute), .accumulates = {buffer}}, before);
  graph.add({.name        = "sum",
             .lane        = graph.lane(rank, sg::LaneKind::reduce),
             .accumulates = {buffer},
             .part        = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce, .message = "sum"}});
  return graph;
}

}  // namespace

TEST_CASE("a world of processes passes the conformance suite", "[backends][process]") {
  const auto processes = GENERATE(std::vector<std::vector<int>>{{0}}, std::vector<std::vector<int>>{{0}, {1}},
                                  std::vector<std::vector<int>>{{0}, {1}, {2}, {3}, {4}},
                                  std::vector<std::vector<int>>{{1, 4}, {0}, {2, 3, 5}});
  static int seen      = 1;
  if (sg::testing::left_out(seen, 4)) return;  // sanitized: the last
  int num_ranks = 0;
  for (const auto& process : processes) num_ranks += static_cast<int>(process.size());
  const auto size = static_cast<int>(processes.size());
  CAPTURE(size, num_ranks);
  const Places places(size);
  MemoryLetters letters;
  std::vector<std::vector<std::string>> failures(processes.size());
  const auto errors = run_processes(size, [&](int process) {
    std::vector<Rank> ranks;
    for (const int rank : processes[static_cast<std::size_t>(process)]) ranks.push_back(Rank{rank});
    sg::MessageWorld world(places.of(process), num_ranks, RankSet(ranks), quiet(), over(letters));
    failures[static_cast<std::size_t>(process)] =
        sg::testing::world_conformance(world, {.rank_order   = true,
                                               .large_bytes  = 3'000'000 / sg::testing::scale(),
                                               .num_random   = sg::testing::cases(4),
                                               .threads      = 1,
                                               .step_timeout = 20s * sg::testing::slowness()});
  });
  CHECK(errors == nothing(size));
  CHECK(failures == std::vector<std::vector<std::string>>(processes.size()));
}

TEST_CASE("programs that do not fit together are refused by all processes, with the operation", "[backends][process]") {
  const Places places(3);
  MemoryLetters letters;
  std::vector<std::string> refusals(3);
  const auto errors = run_processes(3, [&](int process) {
    sg::MessageWorld world(places.of(process), quiet(), over(letters));
    const Rank rank{process};
    const sg::Program same(ring(3, rank, 64), world);
    try {
      const sg::Program other(ring(3, rank, process == 2 ? 128 : 64), world);
    } catch (const sg::Error& error) {
      refusals[static_cast<std::size_t>(process)] = error.what();
      world.peers()->barrier("still usable");
    }
  });
  CHECK(errors == nothing(3));
  for (const std::string& error : refusals) {
    CHECK_THAT(error, ContainsSubstring("programs differ in group 'all' of ranks 0, 1, 2: collectives: operation 0 is "
                                        "all_reduce 'sum' f32 sum of 64 bytes in process 0"));
    CHECK_THAT(error, ContainsSubstring("of 128 bytes in process 2"));
  }
}

TEST_CASE("groups of one name and different ranks have their own collectives", "[backends][process]") {
  const Places places(3);
  MemoryLetters letters;
  std::vector<float> sums(3);
  const auto errors = run_processes(3, [&](int process) {
    sg::MessageWorld world(places.of(process), quiet(), over(letters));
    const Rank me{process};
    sg::Graph graph(3, me);
    const sg::Buffer data = graph.buffer({.name = "data", .rank = me, .size_bytes = 4, .type = sg::DType::f32});
    graph.add({.name = "fill", .lane = graph.lane(me, sg::LaneKind::compute), .writes = {data}},
              [](const sg::Context& context) { context.write<float>()[0] = 1; });
    const auto sum = [&](std::vector<Rank> ranks) {
      if (std::ranges::find(ranks, me) == ranks.end()) return;
      const sg::Group group = graph.group({.name = "g", .ranks = std::move(ranks)});
      graph.add({.name        = "sum",
                 .lane        = graph.lane(me, sg::LaneKind::reduce),
                 .accumulates = {data},
                 .part        = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce, .message = "sum"}});
    };
    sum({Rank{0}, Rank{1}});
    sum({Rank{0}, Rank{2}});
    sum({Rank{0}, Rank{1}, Rank{2}});
    graph.add({.name = "keep", .lane = graph.lane(me, sg::LaneKind::compute), .reads = {data}},
              [&](const sg::Context& context) { sums[static_cast<std::size_t>(process)] = context.read<float>()[0]; });
    const sg::Program program(graph, world);
    sg::Executor executor({.threads = 1, .waiting_lanes = 1});
    executor.run(program);
  });
  CHECK(errors == nothing(3));
  CHECK(sums == std::vector<float>(3, 8));  // 2, 2 and 1; then 3, 2 and 3; then 8
}

TEST_CASE("groups of one name and different ranks have their own messages", "[backends][process]") {
  sg::Graph graph(3, Rank{0});
  const sg::Group two     = graph.group({.name = "g", .ranks = {Rank{0}, Rank{1}}});
  const sg::Group three   = graph.group({.name = "g", .ranks = {Rank{0}, Rank{1}, Rank{2}}});
  const sg::Buffer buffer = graph.buffer({.name = "x", .rank = Rank{0}, .size_bytes = 4, .type = sg::DType::f32});
  for (const sg::Group group : {two, three}) {
    graph.add({.name  = "send",
               .lane  = graph.lane(Rank{0}, sg::LaneKind::pp_send),
               .reads = {buffer},
               .part  = sg::PartSpec{.group = group, .op = sg::PartOp::send, .peer = Rank{1}, .message = "x"}});
  }
  const std::vector<sg::Communicator> groups = {{graph.spec(two), 1}, {graph.spec(three), 1}};
  const std::vector<sg::Outline> outlines    = sg::outline(graph, groups);
  REQUIRE(outlines.size() == 4);
  CHECK(outlines[2].subject == "group 'g' of ranks 0, 1: messages from rank 0 to rank 1");
  CHECK(outlines[3].subject == "group 'g' of ranks 0, 1, 2: messages from rank 0 to rank 1");
  CHECK(outlines[2].lines.size() == 1);
  CHECK(outlines[3].lines.size() == 1);
}

TEST_CASE("a group of a refused program is new in the next one", "[backends][process]") {
  const Places places(2);
  MemoryLetters letters;
  std::vector<std::size_t> num_made(2);
  const auto errors = run_processes(2, [&](int process) {
    MemoryNetwork* network = nullptr;
    sg::MessageWorld world(places.of(process), quiet(), [&](sg::Job&, const sg::ProcessWorld::Hooks&) {
      auto made = std::make_unique<MemoryNetwork>(letters);
      network   = made.get();
      return made;
    });
    const Rank rank{process};
    try {
      const sg::Program refused(ring(2, rank, process == 1 ? 128 : 64), world);
    } catch (const sg::Error&) {
    }
    const sg::Program good(ring(2, rank, 64), world);
    for (const sg::Connections& made : network->connected)
      num_made[static_cast<std::size_t>(process)] += made.groups.size();
    sg::Executor executor({.threads = 1, .waiting_lanes = 1});
    executor.run(good);
  });
  CHECK(errors == nothing(2));
  CHECK(num_made == std::vector<std::size_t>{1, 1});
}

TEST_CASE("an abort does not end an earlier run of a process that is behind", "[backends][process]") {
  const Places places(2);
  MemoryLetters letters;
  std::vector<std::string> results(2);  // of each run: good or aborted
  const auto errors = run_processes(2, [&](int process) {
    sg::MessageWorld world(places.of(process), quiet(), over(letters));
    const Rank me{process}, other{1 - process};
    sg::Graph graph(2, me);
    const sg::Group pair  = graph.group({.name = "pair", .ranks = {Rank{0}, Rank{1}}});
    const sg::Buffer data = graph.buffer({.name = "data", .rank = me, .size_bytes = 64, .type = sg::DType::f32});
    sg::NodeSpec node{.name = "message",
                      .lane = graph.lane(me, process == 0 ? sg::LaneKind::pp_send : sg::LaneKind::pp_recv),
                      .part = sg::PartSpec{.group   = pair,
                                           .op      = process == 0 ? sg::PartOp::send : sg::PartOp::recv,
                                           .peer    = other,
                                           .message = "message"}};
    (process == 0 ? node.reads : node.writes) = {data};
    graph.add(std::move(node));
    const sg::Program program(graph, world);
    sg::Executor executor({.threads = 1, .waiting_lanes = 1});
    const auto run = [&](bool cancel) {
      std::string& result = results[static_cast<std::size_t>(process)];
      try {
        sg::Run one = executor.start(program);
        if (cancel) world.abort("planned");
        one.get();
        result += 'g';
      } catch (const sg::Error&) {
        result += 'a';
      }
    };
    if (process == 0) {
      run(false);
      run(true);  // process 1 has not begun the first run yet
    }
    world.peers()->barrier("aborted");
    if (process == 1) {
      std::this_thread::sleep_for(200ms);  // the note of the abort has a connection of its own
      run(false);
      run(false);
    }
    world.peers()->barrier("ended");
    run(false);
  });
  CHECK(errors == nothing(2));
  REQUIRE(results[0].size() == 3);
  CHECK(results[0].front() == 'g');
  CHECK(results[1].front() == 'g');  // process 0 has ended it well
  CHECK(results[0].back() == 'g');
  CHECK(results[1] == "gag");
}

TEST_CASE("the end of a world says whether the job has failed", "[backends][process]") {
  const Places places(3);
  MemoryLetters letters;
  std::vector<int> good(3, -1);
  const auto errors = run_processes(3, [&](int process) {
    sg::MessageWorld world(places.of(process), quiet(), over(letters));
    const sg::Program program(ring(3, Rank{process}, 64), world);
    sg::Executor executor({.threads = 1, .waiting_lanes = 1});
    executor.run(program);
    world.peers()->barrier("all have run");
    if (process == 2) throw std::runtime_error("planned");  // after its last communication
    good[static_cast<std::size_t>(process)] = world.end();
  });
  CHECK(errors[2] == "planned");
  CHECK(good == std::vector<int>{0, 0, -1});
}

TEST_CASE("a process leaves a report if it is told to end while it waits", "[backends][process]") {
  const Places places(2);
  MemoryLetters letters;
  const sg::testing::TempFolder folder;
  const std::string report  = (folder / "rank-0.json").string();
  std::atomic<bool> written = false;
  const auto errors         = run_processes(2, [&](int process) {
    sg::ProcessWorldOptions options = quiet();
    if (process == 0) options.flight_folder = folder.path().string();
    sg::MessageWorld world(places.of(process), options, over(letters));
    const sg::Program program(ring(2, Rank{process}, 64), world);
    sg::Executor executor({.threads = 1, .waiting_lanes = 1});
    if (process == 1) static_cast<void>(sg::testing::eventually([&] { return written.load(); }));
    sg::Run run = executor.start(program);
    if (process == 0) {
      written = sg::testing::eventually([&] {
        world.note_signal();  // it may not wait yet
        return std::filesystem::exists(report);
      });
    }
    run.get();
  });
  CHECK(errors == nothing(2));
  CHECK(written);
  CHECK(sg::read_flights(folder.path().string()).flights.at(0).progress.waits.size() == 1);
}

TEST_CASE("a process that leaves ends the run of all others with its name", "[backends][process]") {
  const int dead = GENERATE(0, 2);
  CAPTURE(dead);
  const Places places(4);
  MemoryLetters letters;
  std::vector<std::string> lines(4);
  const auto errors = run_processes(4, [&](int process) {
    sg::MessageWorld world(places.of(process), quiet(&lines, process), over(letters));
    const sg::Program program(ring(4, Rank{process}, 1 << 20), world);
    if (process == dead) throw std::runtime_error("planned");
    sg::Executor executor({.threads = 1, .waiting_lanes = 1});
    for (;;) executor.run(program);
  });
  for (int process = 0; process < 4; ++process) {
    CAPTURE(process);
    const std::string& line = lines[static_cast<std::size_t>(process)];
    CHECK_THAT(line, ContainsSubstring("failed: has ended because of an error"));
    CHECK(line.starts_with("rank " + std::to_string(dead) + (process == dead ? " (this process)" : " failed")));
    // An error can come from another process: then it has the line of that one, which names the node that waited there.
    const auto is_in_error = [&](const std::string& each) {
      return errors[static_cast<std::size_t>(process)].find(each) != std::string::npos;
    };
    CAPTURE(errors, lines);
    if (process != dead) CHECK(std::any_of(lines.begin(), lines.end(), is_in_error));
  }
}

TEST_CASE("a run that is aborted by one process ends in all, and the next one works", "[backends][process]") {
  const Places places(3);
  MemoryLetters letters;
  std::vector<std::string> results(3);  // of each run: good or aborted
  std::vector<std::size_t> num_left(3, 1);
  const auto errors = run_processes(3, [&](int process) {
    MemoryNetwork* network = nullptr;
    sg::MessageWorld world(places.of(process), quiet(), [&](sg::Job&, const sg::ProcessWorld::Hooks&) {
      auto made = std::make_unique<MemoryNetwork>(letters);
      network   = made.get();
      return made;
    });
    std::atomic<bool> gives_up = false;
    const sg::Program program(ring(3, Rank{process}, 1 << 20,
                                   [&](const sg::Context& context) {
                                     while (gives_up && !context.stopping()) std::this_thread::yield();
                                   }),
                              world);
    sg::Executor executor({.threads = 1, .waiting_lanes = 1});
    std::string& result = results[static_cast<std::size_t>(process)];
    // In turns, one process gives up before it sends what the others wait for.
    for (int step = 0; step < 6; ++step) {
      gives_up    = step % 3 == process && step % 2 == 0;
      sg::Run run = executor.start(program);
      if (gives_up) run.cancel("planned");
      try {
        run.get();
        result += 'g';
      } catch (const sg::Error&) {
        result += 'a';
      }
      world.peers()->barrier("step");
    }
    gives_up = false;
    executor.run(program);
    executor.run(program);
    num_left[static_cast<std::size_t>(process)] = network->num_wanted();
  });
  CHECK(errors == nothing(3));
  CHECK(results == std::vector<std::string>(3, "agagag"));
  CHECK(num_left == std::vector<std::size_t>(3, 0));
}

TEST_CASE("a process that ends after an aborted run keeps no other one waiting", "[backends][process]") {
  const int ends = GENERATE(0, 1, 2);
  CAPTURE(ends);
  const Places places(3);
  MemoryLetters letters;
  bool good         = true;
  const auto errors = run_processes(3, [&](int process) {
    sg::MessageWorld world(places.of(process), quiet(), over(letters));
    const bool gives_up = process == 1;  // before it sends what the others wait for
    const sg::Program program(ring(3, Rank{process}, 1 << 20,
                                   [&](const sg::Context& context) {
                                     while (gives_up && !context.stopping()) std::this_thread::yield();
                                   }),
                              world);
    sg::Executor executor({.threads = 1, .waiting_lanes = 1, .step_timeout = 20s * sg::testing::slowness()});
    sg::Run run = executor.start(program);
    if (gives_up) run.cancel("planned");
    try {
      run.get();
    } catch (const sg::Error&) {
    }
    if (process == ends) {
      good = world.end();
    } else {
      executor.run(program);
    }
  });
  CHECK_FALSE(good);
  for (int process = 0; process < 3; ++process) {
    CAPTURE(process);
    const std::string& error = errors[static_cast<std::size_t>(process)];
    if (process == ends) {
      CHECK(error.empty());
    } else {
      CHECK_FALSE(error.empty());
    }
  }
}

TEST_CASE("a process that has ended before the abort of a run keeps no other one waiting", "[backends][process]") {
  const int ends = GENERATE(0, 1);
  CAPTURE(ends);
  const Places places(2);
  MemoryLetters letters;
  bool good         = true;
  bool aborted      = false;
  const auto errors = run_processes(2, [&](int process) {
    sg::MessageWorld world(places.of(process), quiet(), over(letters));
    const sg::Program program(ring(2, Rank{process}, 64), world);
    sg::Executor executor({.threads = 1, .waiting_lanes = 1, .step_timeout = 20s * sg::testing::slowness()});
    executor.run(program);
    if (process == ends) {
      good = world.end();
      return;
    }
    sg::Run run = executor.start(program);  // waits for the other process
    run.cancel("planned");
    try {
      run.get();
    } catch (const sg::Error&) {
      aborted = true;
    }
    executor.run(program);
  });
  CHECK(aborted);
  CHECK_FALSE(good);
  CHECK(errors[static_cast<std::size_t>(ends)].empty());
  CHECK_THAT(errors[static_cast<std::size_t>(1 - ends)], ContainsSubstring("another process has ended"));
}
