#include "backends/nccl/world.hpp"

#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <thread>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/conformance/world_conformance.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/golden.hpp"
#include "tests/support/worlds/nccl_processes.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using sg::Rank;
using sg::testing::in_nccl_processes;
using sg::testing::NcclProcess;
using sg::testing::quiet_options;
using Kind = sg::nccl::Call::Kind;

namespace {

std::vector<std::string> nothing(int size) { return std::vector<std::string>(static_cast<std::size_t>(size)); }

std::vector<Rank> ranks_up_to(int size) {
  std::vector<Rank> all;
  for (int i = 0; i < size; ++i) all.push_back(Rank{i});
  return all;
}

using BodyOf = std::function<void(const sg::Context&)>;

// All-reduces of one rank, each of its own buffer and on its own group. `before` runs before them.
sg::Graph sums(int size, Rank rank, int count, std::int64_t bytes, const BodyOf& before = {}, bool together = false) {
  sg::Graph graph(size, rank);
  for (int i = 0; i < count; ++i) {
    const sg::Group group   = graph.group({.name = i == 0 ? "all" : sg::str("all ", i), .ranks = ranks_up_to(size)});
    const sg::Buffer buffer = graph.buffer({.name       = sg::str("buffer ", i),
                                            .rank       = rank,
                                            .size_bytes = bytes,
                                            .type       = sg::DType::f32,
                                            .lifetime   = sg::Lifetime::persistent});
    if (before && i == 0)
      graph.add(
          {.name = "before", .lane = graph.lane(rank, sg::LaneKind::compute), .accumulates = {buffer}, .device = true},
          before);
    graph.add(
        {.name        = sg::str("sum ", i),
         .lane        = graph.lane(rank, i % 2 == 0 ? sg::LaneKind::reduce : sg::LaneKind::tp),
         .accumulates = {buffer},
         .part        = sg::PartSpec{
                    .group = group, .op = sg::PartOp::all_reduce, .message = sg::str("sum ", i), .issue = together ? 0 : -1}});
  }
  return graph;
}

// The time-out of processes that wait for a peer that never answers.
std::chrono::seconds short_wait() { return sg::testing::is_sanitized() ? 4s : 1s; }

void run(const sg::Program& program) {
  sg::Executor executor({.threads = 1, .step_timeout = 40s * sg::testing::slowness()});
  executor.run(program);
}

}  // namespace

TEST_CASE("the world of NCCL passes the conformance suite", "[backends][nccl]") {
  const int size   = GENERATE(1, 2, 3, 4, 5);
  const bool exact = GENERATE(false, true);
  if (sg::testing::sanitized() && size != (exact ? 2 : 3)) return;
  CAPTURE(size, exact);
  std::vector<std::vector<std::string>> failures(static_cast<std::size_t>(size));
  const auto errors =
      in_nccl_processes(size, {.calls = {.exact = exact, .chunk_bytes = 8 * 1024}}, [&](const NcclProcess& me) {
        failures[static_cast<std::size_t>(me.process)] =
            sg::testing::world_conformance(me.world, {.rank_order   = exact,
                                                      .large_bytes  = 400'000 / sg::testing::scale(),
                                                      .num_random   = sg::testing::cases(2),
                                                      .threads      = 1,
                                                      .step_timeout = 20s * sg::testing::slowness()});
      });
  CHECK(errors == nothing(size));
  CHECK(failures == std::vector<std::vector<std::string>>(static_cast<std::size_t>(size)));
}

TEST_CASE("parts that are issued together are one group of NCCL, in the order of their turns", "[backends][nccl]") {
  std::vector<std::vector<std::vector<std::uint32_t>>> groups(2);  // [process][group]: bytes of the calls
  const auto errors = in_nccl_processes(2, {}, [&](const NcclProcess& me) {
    const Rank mine{me.process}, other{1 - me.process};
    sg::Graph graph(2, mine);
    const sg::Group group = graph.group({.name = "ring", .ranks = ranks_up_to(2)});
    const auto message    = [&](sg::PartOp op, int bytes, int issue) {
      const sg::Buffer buffer = graph.buffer({.name = sg::str("b", bytes), .rank = mine, .size_bytes = bytes});
      sg::NodeSpec node{.name = sg::str(to_string(op), ' ', bytes)};
      (op == sg::PartOp::send ? node.reads : node.writes) = {buffer};
      node.lane = graph.lane(mine, op == sg::PartOp::send ? sg::LaneKind::pp_send : sg::LaneKind::pp_recv);
      node.part =
          sg::PartSpec{.group = group, .op = op, .type = sg::DType::u8, .peer = other, .message = "m", .issue = issue};
      graph.add(std::move(node));
    };
    // Each of the two would wait for ever if its send had to end before its receive.
    message(sg::PartOp::send, me.process == 0 ? 8 : 16, 0);
    message(sg::PartOp::recv, me.process == 0 ? 16 : 8, 0);
    message(sg::PartOp::send, me.process == 0 ? 24 : 32, 1);
    message(sg::PartOp::recv, me.process == 0 ? 32 : 24, 1);
    run(sg::Program(graph, me.world));
    for (const auto& each : me.library.groups) {
      auto& bytes = groups[static_cast<std::size_t>(me.process)].emplace_back();
      for (const auto& logged : each) bytes.push_back(static_cast<std::uint32_t>(logged.call.bytes));
      std::ranges::sort(bytes);
    }
  });
  CHECK(errors == nothing(2));
  for (const auto& each : groups) CHECK(each == std::vector<std::vector<std::uint32_t>>{{8, 16}, {24, 32}});
}

TEST_CASE("collectives that only some members issue together meet each other", "[backends][nccl]") {
  std::vector<std::size_t> num_groups(2);
  const auto errors = in_nccl_processes(2, {}, [&](const NcclProcess& me) {
    const sg::Program program(sums(2, Rank{me.process}, 2, 64, {}, me.process == 1), me.world);
    const std::vector<float> ones(16, 1);
    for (std::uint32_t buffer = 0; buffer < 2; ++buffer) program.memory().write(sg::Buffer{buffer}, std::span(ones));
    run(program);
    std::vector<float> found(16);
    program.memory().read(sg::Buffer{1}, std::span(found));
    if (found != std::vector<float>(16, 2)) throw std::runtime_error("wrong numbers");
    num_groups[static_cast<std::size_t>(me.process)] = me.library.groups.size();
  });
  CHECK(errors == nothing(2));
  CHECK(num_groups == std::vector<std::size_t>{2, 1});
}

TEST_CASE("collectives of one group that only some members issue together are refused by all", "[backends][nccl]") {
  const auto errors = in_nccl_processes(2, {}, [&](const NcclProcess& me) {
    const Rank mine{me.process};
    sg::Graph graph(2, mine);
    const sg::Group group = graph.group({.name = "all", .ranks = ranks_up_to(2)});
    for (const auto kind : {sg::LaneKind::reduce, sg::LaneKind::tp}) {
      const sg::Buffer buffer = graph.buffer({.name = "b", .rank = mine, .size_bytes = 64, .type = sg::DType::f32});
      const int issue         = me.process == 1 ? 0 : -1;
      graph.add({.name        = "sum",
                 .lane        = graph.lane(mine, kind),
                 .accumulates = {buffer},
                 .part = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce, .message = "m", .issue = issue}});
    }
    const sg::Program program(graph, me.world);
  });
  for (const std::string& error : errors) CHECK_THAT(error, ContainsSubstring("issued together with that before"));
}

TEST_CASE("a reduction in several groups that is issued together with others is refused by all", "[backends][nccl]") {
  const auto errors = in_nccl_processes(2, {.calls = {.exact = true}}, [&](const NcclProcess& me) {
    const sg::Program small(sums(2, Rank{me.process}, 2, 1024, {}, true), me.world);  // one group
    run(small);
    const sg::Program program(sums(2, Rank{me.process}, 2, 1 << 20, {}, true), me.world);
  });
  for (const std::string& error : errors)
    CHECK_THAT(error, ContainsSubstring("is issued together with 1 other parts") && ContainsSubstring("in 2 groups"));
}

TEST_CASE("parts of all lanes of a rank run in its issue order", "[backends][nccl]") {
  const auto errors = in_nccl_processes(2, {}, [&](const NcclProcess& me) {
    const Rank mine{me.process};
    sg::Graph graph(2, mine);
    const sg::Group a = graph.group({.name = "a", .ranks = ranks_up_to(2)});
    const sg::Group b = graph.group({.name = "b", .ranks = ranks_up_to(2)});
    for (int i = 0; i < 6; ++i) {
      const sg::Buffer buffer = graph.buffer({.name = sg::str(i), .rank = mine, .size_bytes = 4 * (i + 1)});
      graph.add({.name        = sg::str("sum ", i),
                 .lane        = graph.lane(mine, i % 2 == 0 ? sg::LaneKind::reduce : sg::LaneKind::tp),
                 .accumulates = {buffer},
                 .part = sg::PartSpec{.group = i % 2 == 0 ? a : b, .op = sg::PartOp::all_reduce, .message = "m"}});
    }
    run(sg::Program(graph, me.world));
    std::vector<std::int64_t> bytes;
    for (const auto& each : me.library.groups) bytes.push_back(each.at(0).call.bytes);
    if (bytes != std::vector<std::int64_t>{4, 8, 12, 16, 20, 24}) throw std::runtime_error("another order");
  });
  CHECK(errors == nothing(2));
}

TEST_CASE("after an abort in one process the next step works on new communicators", "[backends][nccl]") {
  std::vector<std::string> first(3), second(3);
  const auto errors = in_nccl_processes(3, {}, [&](const NcclProcess& me) {
    int fails         = 1;  // the process that fails in the next run
    const auto before = [&, process = me.process](const sg::Context&) {
      if (process == fails) throw std::runtime_error("planned failure");
    };
    const sg::Program program(sums(3, Rank{me.process}, 2, 4096, before), me.world);
    first[static_cast<std::size_t>(me.process)]  = sg::testing::error_of([&] { run(program); });
    fails                                        = 2;
    second[static_cast<std::size_t>(me.process)] = sg::testing::error_of([&] { run(program); });
    fails                                        = -1;
    // A program that is made between the abort and the recovery.
    const sg::Program other(sums(3, Rank{me.process}, 1, 64), me.world);
    const std::vector<float> ones(1024, 1);
    for (std::uint32_t buffer = 0; buffer < 2; ++buffer) program.memory().write(sg::Buffer{buffer}, std::span(ones));
    for (int step = 0; step < 2; ++step) run(program);
    run(other);
    std::vector<float> found(1024);
    program.memory().read(sg::Buffer{1}, std::span(found));
    if (found != std::vector<float>(1024, 9)) throw std::runtime_error("wrong numbers");
    if (me.library.num_resets != 2 || me.device.num_drops != 2) throw std::runtime_error("no recovery");
    if (me.library.made.size() != 6) throw std::runtime_error("another number of communicators");
    if (!me.world.end() || !me.library.closed) throw std::runtime_error("no normal end");
  });
  CHECK(errors == nothing(3));
  CHECK_THAT(first[1], ContainsSubstring("planned failure"));
  for (const std::size_t process : {0, 2}) CHECK_THAT(first[process], ContainsSubstring("aborted by process 1"));
  CHECK_THAT(second[2], ContainsSubstring("planned failure"));
  for (const std::size_t process : {0, 1}) CHECK_THAT(second[process], ContainsSubstring("aborted by process 2"));
}

TEST_CASE("a job whose last run was aborted ends as usual", "[backends][nccl]") {
  std::vector<std::string> seen(2);
  const auto errors = in_nccl_processes(2, {}, [&](const NcclProcess& me) {
    const auto before = [process = me.process](const sg::Context&) {
      if (process == 1) throw std::runtime_error("planned failure");
    };
    const sg::Program program(sums(2, Rank{me.process}, 1, 64, before), me.world);
    seen[static_cast<std::size_t>(me.process)] = sg::testing::error_of([&] { run(program); });
    if (!me.world.end()) throw std::runtime_error("no normal end");
  });
  CHECK(errors == nothing(2));
  CHECK_THAT(seen[0], ContainsSubstring("aborted by process 1"));
  CHECK_THAT(seen[1], ContainsSubstring("planned failure"));
}

TEST_CASE("an abort while other processes make communicators is no error of theirs", "[backends][nccl]") {
  std::vector<std::string> first(3);
  std::atomic<bool> fails{true};
  const auto errors = in_nccl_processes(3, {}, [&](const NcclProcess& me) {
    const Rank mine{me.process};
    const auto before = [&, process = me.process](const sg::Context&) {
      if (process == 0 && fails.exchange(false)) throw std::runtime_error("planned failure");
    };
    const sg::Program all(sums(3, mine, 1, 64, before), me.world);
    // Process 2 would never make the communicator of this program. Process 0 needs none, and goes on.
    me.library.silent_in_make = me.process == 2;
    sg::Graph graph(3, mine);
    if (me.process > 0) {
      const sg::Group two     = graph.group({.name = "two", .ranks = {Rank{1}, Rank{2}}});
      const sg::Buffer buffer = graph.buffer({.name = "b", .rank = mine, .size_bytes = 64, .type = sg::DType::f32});
      graph.add({.name        = "sum of two",
                 .lane        = graph.lane(mine, sg::LaneKind::reduce),
                 .accumulates = {buffer},
                 .part        = sg::PartSpec{.group = two, .op = sg::PartOp::all_reduce, .message = "m"}});
    }
    const sg::Program some(graph, me.world);
    me.library.silent_in_make                   = false;
    first[static_cast<std::size_t>(me.process)] = sg::testing::error_of([&] { run(all); });
    for (int step = 0; step < 2; ++step) {
      run(all);
      run(some);
    }
  });
  CHECK(errors == nothing(3));
  CHECK_THAT(first[0], ContainsSubstring("planned failure"));
  for (const std::size_t process : {1, 2}) CHECK_THAT(first[process], ContainsSubstring("aborted by process 0"));
}

TEST_CASE("an abort in the first run after a recovery ends that of a process that still recovers", "[backends][nccl]") {
  // Process 2 goes on with its recovery when process 0 has aborted the next run; process 2 may have been told then.
  const bool is_told = GENERATE(false, true);
  CAPTURE(is_told);
  std::vector<std::string> first(3), second(3);
  std::atomic<bool> aborted{false};
  const auto errors = in_nccl_processes(3, {}, [&](const NcclProcess& me) {
    const auto at     = static_cast<std::size_t>(me.process);
    int fails         = 1;  // the process that fails in the next run
    const auto before = [&, process = me.process](const sg::Context&) {
      if (process == fails) throw std::runtime_error("planned failure");
    };
    const sg::Program program(sums(3, Rank{me.process}, 1, 64, before), me.world);
    first[at] = sg::testing::error_of([&] { run(program); });
    fails     = 0;
    if (me.process == 2) {
      me.library.after_join = [&] {
        static_cast<void>(sg::testing::eventually([&] { return aborted.load(); }));
        if (is_told) std::this_thread::sleep_for(100ms);
      };
    }
    second[at] = sg::testing::error_of([&] { run(program); });
    if (me.process == 0) aborted = true;
    me.library.after_join = {};
    fails                 = -1;
    for (int step = 0; step < 2; ++step) run(program);
    if (me.library.num_resets != 2) throw std::runtime_error("another number of recoveries");
    if (!me.world.end()) throw std::runtime_error("no normal end");
  });
  CHECK(errors == nothing(3));
  CHECK_THAT(first[1], ContainsSubstring("planned failure"));
  CHECK_THAT(second[0], ContainsSubstring("planned failure"));
  for (const std::size_t process : {1, 2}) CHECK_THAT(second[process], ContainsSubstring("aborted by process 0"));
}

TEST_CASE("a note about the last generation does not disturb a recovery", "[backends][nccl]") {
  std::atomic<int> num_joined{0};
  const auto errors = in_nccl_processes(3, {}, [&](const NcclProcess& me) {
    bool fails        = false;
    const auto before = [&](const sg::Context&) {
      if (fails) throw std::runtime_error("planned failure");
    };
    const sg::Program program(sums(3, Rank{me.process}, 2, 64, before), me.world);
    run(program);
    fails = me.process == 1;
    static_cast<void>(sg::testing::error_of([&] { run(program); }));
    fails = false;
    // Process 0 has aborted the first run of the last generation too. The others are told when all make communicators.
    bool joined           = false;
    me.library.after_join = [&] {
      if (std::exchange(joined, true)) return;
      ++num_joined;
      static_cast<void>(sg::testing::eventually([&] { return num_joined == 3; }));
      if (me.process == 0) me.world.job().control().tell("0 1 another failure");
      std::this_thread::sleep_for(200ms);  // the note has a connection of its own
    };
    for (int step = 0; step < 2; ++step) run(program);
    if (me.library.num_resets != 1) throw std::runtime_error("another number of recoveries");
  });
  CHECK(errors == nothing(3));
}

TEST_CASE("a recovery in which a communicator cannot be made ends all processes", "[backends][nccl]") {
  const auto errors = in_nccl_processes(
      2, {},
      [&](const NcclProcess& me) {
        bool fails        = me.process == 1;
        const auto before = [&](const sg::Context&) {
          if (fails) throw std::runtime_error("planned failure");
        };
        const sg::Program program(sums(2, Rank{me.process}, 1, 64, before), me.world);
        static_cast<void>(sg::testing::error_of([&] { run(program); }));
        fails                     = false;
        me.library.silent_in_make = me.process == 1;
        static_cast<void>(sg::testing::error_of([&] { run(program); }));
        run(program);  // there is no other recovery
      },
      quiet_options(short_wait()));
  for (const std::string& error : errors)
    CHECK_THAT(error, ContainsSubstring("making communicator 'all'") && ContainsSubstring("time-out"));
}

TEST_CASE("a process that never comes to a collective is named, with the node", "[backends][nccl]") {
  const auto errors = in_nccl_processes(
      2, {},
      [&](const NcclProcess& me) {
        const sg::Program program(sums(2, Rank{me.process}, 1, 64,
                                       [process = me.process](const sg::Context& context) {
                                         while (process == 1 && !context.stopping()) std::this_thread::sleep_for(1ms);
                                       }),
                                  me.world);
        run(program);
      },
      quiet_options(short_wait()));
  for (const std::string& error : errors)
    CHECK_THAT(error, ContainsSubstring("rank 1") && ContainsSubstring("stuck") && ContainsSubstring("sum 0"));
}

TEST_CASE("a process that never makes its communicator is a time-out", "[backends][nccl]") {
  const auto errors = in_nccl_processes(
      2, {},
      [&](const NcclProcess& me) {
        me.library.silent_in_make = me.process == 1;
        const sg::Program program(sums(2, Rank{me.process}, 1, 64), me.world);
      },
      quiet_options(short_wait()));
  for (const std::string& error : errors)
    CHECK_THAT(error, ContainsSubstring("making communicator 'all'") && ContainsSubstring("time-out"));
}

TEST_CASE("an error of the library names the node and the rank", "[backends][nccl]") {
  const auto errors = in_nccl_processes(
      2, {},
      [&](const NcclProcess& me) {
        const sg::Program program(sums(2, Rank{me.process}, 1, 64), me.world);
        me.library.fails_in_group = me.process == 1;
        run(program);
      },
      quiet_options(2s * sg::testing::slowness()));
  CHECK_THAT(errors[1], ContainsSubstring("'sum 0'") && ContainsSubstring("rank 1") &&
                            ContainsSubstring("planned error of the library"));
  CHECK_THAT(errors[0], ContainsSubstring("rank 1") || ContainsSubstring("process 1"));
}

TEST_CASE("an asynchronous error of the library ends the run in all processes", "[backends][nccl]") {
  const auto errors = in_nccl_processes(
      2, {},
      [&](const NcclProcess& me) {
        const sg::Program program(sums(2, Rank{me.process}, 1, 64), me.world);
        me.library.silent_in_group = me.process == 0;
        me.library.has_failed      = me.process == 1;
        run(program);
      },
      quiet_options(2s * sg::testing::slowness()));
  CHECK_THAT(errors[1], ContainsSubstring("planned asynchronous error"));
  CHECK_THAT(errors[0], ContainsSubstring("process 1") || ContainsSubstring("rank 1"));
}

TEST_CASE("a program is captured if all processes can", "[backends][nccl]") {
  std::vector<std::vector<bool>> captured(2);
  const auto errors = in_nccl_processes(2, {}, [&](const NcclProcess& me) {
    const sg::Program first(sums(2, Rank{me.process}, 1, 64), me.world);
    me.world.set_capture(me.process == 0);
    const sg::Program second(sums(2, Rank{me.process}, 1, 64), me.world);
    captured[static_cast<std::size_t>(me.process)] = me.device.captured;
  });
  CHECK(errors == nothing(2));
  for (const auto& each : captured) CHECK(each == std::vector<bool>{true, false});
}

TEST_CASE("a group of which some members have messages only can have a collective later", "[backends][nccl]") {
  const auto errors = in_nccl_processes(3, {}, [&](const NcclProcess& me) {
    const Rank mine{me.process};
    sg::Graph graph(3, mine);
    const sg::Group group = graph.group({.name = "all", .ranks = ranks_up_to(3)});
    const sg::Buffer buffer =
        graph.buffer({.name = "b", .rank = mine, .size_bytes = 64, .lifetime = sg::Lifetime::persistent});
    const auto message = [&](sg::PartOp op, Rank peer) {
      sg::NodeSpec node{.name = "message", .lane = graph.lane(mine, sg::LaneKind::pp_send)};
      (op == sg::PartOp::send ? node.reads : node.writes) = {buffer};
      node.part = sg::PartSpec{.group = group, .op = op, .type = sg::DType::f32, .peer = peer, .message = "m"};
      graph.add(std::move(node));
    };
    if (me.process == 2) message(sg::PartOp::send, Rank{1});
    if (me.process == 1) message(sg::PartOp::recv, Rank{2});
    const sg::Program messages(graph, me.world);
    const sg::Program collective(sums(3, mine, 1, 64), me.world);
    const std::vector<float> values(16, static_cast<float>(me.process));
    messages.memory().write(buffer, std::span(values));
    for (int step = 0; step < 2; ++step) {
      run(messages);
      run(collective);
    }
    std::vector<float> found(16);
    messages.memory().read(buffer, std::span(found));
    if (found != std::vector<float>(16, me.process == 0 ? 0.F : 2.F)) throw std::runtime_error("wrong numbers");
    if (me.library.made.size() != 2) throw std::runtime_error("another number of communicators");
  });
  CHECK(errors == nothing(3));
}

#if !defined(STEPGRAPH_WITH_CUDA)  // in a CUDA build, ops would enqueue CUDA kernels
TEST_CASE("training with exact reductions has the bits of loopback", "[backends][nccl]") {
  using sg::testing::golden;
  const sg::Plan plan =
      GENERATE(sg::Plan{.layout = {.dp = 2}}, sg::Plan{.layout = {.tp = 2}}, sg::Plan{.layout = {.pp = 2}},
               sg::Plan{.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full, .min_params = 100}});
  static int seen = 1;
  if (sg::testing::left_out(seen, 4)) return;  // sanitized: the last; the next test has dp and tp
  const int steps                     = sg::testing::sanitized() ? 2 : 3;
  const sg::testing::Trained expected = sg::testing::train(golden("gpt2-tiny"), plan, 2, steps);
  std::vector<sg::testing::Trained> found(2);
  const auto errors = in_nccl_processes(2, {.calls = {.exact = true}}, [&](const NcclProcess& me) {
    found[static_cast<std::size_t>(me.process)] = sg::testing::train(golden("gpt2-tiny"), plan, 2, steps, me.world, 1);
  });
  CHECK(errors == nothing(2));
  for (const auto& each : found) {
    CHECK(each.loss == expected.loss);
    CHECK(each.grad_norm == expected.grad_norm);
  }
  CHECK(found[0].gradients == expected.gradients);
}

TEST_CASE("training with the reductions of NCCL is within the golden bounds", "[backends][nccl]") {
  using sg::testing::golden;
  const sg::Plan plan{.layout = {.dp = 2, .tp = 2}};
  static_cast<void>(golden("gpt2-tiny"));  // read before threads start
  std::vector<sg::testing::Trained> found(4);
  const auto errors = in_nccl_processes(4, {}, [&](const NcclProcess& me) {
    found[static_cast<std::size_t>(me.process)] = sg::testing::train(golden("gpt2-tiny"), plan, 2, 3, me.world, 1);
  });
  CHECK(errors == nothing(4));
  sg::testing::check_golden_bounds(golden("gpt2-tiny"), found[0], 3);
}
#endif
