// A CUDA world with our programs: host nodes, failures, memory.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#if defined(STEPGRAPH_WITH_CUDA)
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>

#include "backends/storage/spill_file.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/device.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/allocations.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

constexpr std::int64_t size = 1 << 20;  // bytes of a buffer

cudaStream_t stream_of(const sg::Context& context) { return static_cast<cudaStream_t>(context.device()->stream); }

sg::Buffer buffer(sg::Graph& graph, const char* name, sg::Space space,
                  sg::Lifetime lifetime = sg::Lifetime::persistent) {
  return graph.buffer({.name = name, .size_bytes = size, .type = sg::DType::u8, .space = space, .lifetime = lifetime});
}

void add_copy(sg::Graph& graph, const char* name, sg::LaneKind lane, sg::Buffer from, sg::Buffer to) {
  graph.add(
      {.name   = name,
       .lane   = graph.lane(sg::Rank{0}, lane),
       .reads  = from,
       .writes = to,
       .kind   = sg::NodeKind::copy,
       .device = true},
      [](const sg::Context& c) {
        if (cudaMemcpyAsync(c.write().data(), c.read().data(), size, cudaMemcpyDefault, stream_of(c)) != cudaSuccess)
          throw std::runtime_error("cudaMemcpyAsync failed");
      });
}

}  // namespace

TEST_CASE("a host node changes data of the GPU, and the GPU uses the result", "[backends][cuda]") {
  const auto world = sg::testing::device_world();
  sg::Graph graph;
  const sg::Buffer start = buffer(graph, "start", sg::Space::device), end = buffer(graph, "end", sg::Space::device);
  const sg::Buffer there = buffer(graph, "there", sg::Space::pinned, sg::Lifetime::step),
                   back  = buffer(graph, "back", sg::Space::pinned, sg::Lifetime::step);
  add_copy(graph, "out", sg::LaneKind::d2h, start, there);
  graph.add({.name   = "add one",
             .lane   = graph.lane(sg::Rank{0}, sg::LaneKind::host),
             .reads  = there,
             .writes = back,
             .kind   = sg::NodeKind::host},
            [](const sg::Context& c) {
              std::transform(c.read<std::uint8_t>().begin(), c.read<std::uint8_t>().end(),
                             c.write<std::uint8_t>().begin(),
                             [](std::uint8_t byte) { return static_cast<std::uint8_t>(byte + 1); });
            });
  add_copy(graph, "in", sg::LaneKind::h2d, back, end);
  add_copy(graph, "again", sg::LaneKind::compute, end, start);
  const sg::Program program(sg::RunnableGraph(graph, sg::plan_memory(graph)), *world);
  sg::Executor executor({.threads = 1, .waiting_lanes = static_cast<int>(program.num_waiting_lanes())});
  program.memory().write(start, std::span<const std::uint8_t>(std::vector<std::uint8_t>(size, 7)));
  for (int run = 0; run < 20; ++run) executor.run(program);
  std::vector<std::uint8_t> seen(size);
  program.memory().read(end, std::span(seen));
  CHECK(std::count(seen.begin(), seen.end(), 27) == size);
}

TEST_CASE("nodes are issued to the GPU while a host node that others follow still runs", "[backends][cuda]") {
  const auto world = sg::testing::device_world();
  sg::Graph graph;
  const sg::Buffer start = buffer(graph, "start", sg::Space::device), end = buffer(graph, "end", sg::Space::device);
  const sg::Buffer there = buffer(graph, "there", sg::Space::pinned), back = buffer(graph, "back", sg::Space::pinned);
  std::atomic<bool> issued = false;
  add_copy(graph, "out", sg::LaneKind::d2h, start, there);
  graph.add({.name   = "wait",
             .lane   = graph.lane(sg::Rank{0}, sg::LaneKind::host),
             .reads  = there,
             .writes = back,
             .kind   = sg::NodeKind::host},
            [&](const sg::Context& c) {
              while (!issued && !c.stopping()) std::this_thread::sleep_for(std::chrono::microseconds(50));
              std::transform(c.read<std::uint8_t>().begin(), c.read<std::uint8_t>().end(),
                             c.write<std::uint8_t>().begin(),
                             [](std::uint8_t byte) { return static_cast<std::uint8_t>(byte + 1); });
            });
  add_copy(graph, "in", sg::LaneKind::h2d, back, end);
  // Issued last, because it reads the result of the host node.
  graph.add(
      {.name   = "last",
       .lane   = graph.lane(sg::Rank{0}, sg::LaneKind::compute),
       .reads  = end,
       .writes = start,
       .device = true},
      [&](const sg::Context& c) {
        if (cudaMemcpyAsync(c.write().data(), c.read().data(), size, cudaMemcpyDefault, stream_of(c)) != cudaSuccess)
          throw std::runtime_error("cudaMemcpyAsync failed");
        issued = true;
      });
  const sg::Program program(sg::RunnableGraph(graph, sg::plan_memory(graph)), *world);
  sg::Executor executor({.threads       = 1,
                         .waiting_lanes = static_cast<int>(program.num_waiting_lanes()),
                         .step_timeout  = std::chrono::seconds(20)});
  program.memory().write(start, std::span<const std::uint8_t>(std::vector<std::uint8_t>(size, 3)));
  for (int run = 0; run < 20; ++run) {
    issued = false;
    executor.run(program);
  }
  std::vector<std::uint8_t> seen(size);
  program.memory().read(end, std::span(seen));
  CHECK(std::count(seen.begin(), seen.end(), 23) == size);
}

TEST_CASE("a host node that fails ends the run on the GPU, and the next run works", "[backends][cuda]") {
  const auto world = sg::testing::device_world();
  sg::Graph graph;
  const sg::Buffer back = buffer(graph, "back", sg::Space::pinned), end = buffer(graph, "end", sg::Space::device);
  bool fails = true;
  graph.add(
      {.name = "make", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::host), .writes = back, .kind = sg::NodeKind::host},
      [&](const sg::Context& c) {
        if (fails) throw std::runtime_error("not this time");
        std::ranges::fill(c.write<std::uint8_t>(), std::uint8_t{9});
      });
  add_copy(graph, "in", sg::LaneKind::h2d, back, end);
  const sg::Program program(graph, *world);
  sg::Executor executor({.threads = 1, .waiting_lanes = static_cast<int>(program.num_waiting_lanes())});
  CHECK_THROWS_AS(executor.run(program), sg::Error);
  fails = false;
  for (int run = 0; run < 3; ++run) executor.run(program);
  std::vector<std::uint8_t> seen(size);
  program.memory().read(end, std::span(seen));
  CHECK(std::count(seen.begin(), seen.end(), 9) == size);
}

TEST_CASE("data of the GPU goes to the disk and comes back", "[backends][cuda][storage]") {
  const auto world = sg::testing::device_world();
  const sg::testing::TempFolder folder;
  sg::Graph graph;
  const sg::Buffer start = buffer(graph, "start", sg::Space::device), end = buffer(graph, "end", sg::Space::device),
                   home  = buffer(graph, "home", sg::Space::disk);
  const sg::Buffer there = buffer(graph, "there", sg::Space::pinned, sg::Lifetime::step),
                   back  = buffer(graph, "back", sg::Space::pinned, sg::Lifetime::step);
  const auto disk_node   = [&](const char* name, sg::Buffer from, sg::Buffer to, const auto& body) {
    graph.add({.name   = name,
                 .lane   = graph.lane(sg::Rank{0}, sg::LaneKind::disk),
                 .reads  = from,
                 .writes = to,
                 .kind   = sg::NodeKind::host},
                body);
  };
  add_copy(graph, "out", sg::LaneKind::d2h, start, there);
  disk_node("to disk", there, home, [](const sg::Context& c) {
    const sg::StoredBytes to = c.stored(sg::AccessMode::write);
    to.storage->write(to.offset, c.read());
  });
  disk_node("from disk", home, back, [](const sg::Context& c) {
    const sg::StoredBytes from = c.stored(sg::AccessMode::read);
    from.storage->read(from.offset, c.write());
  });
  add_copy(graph, "in", sg::LaneKind::h2d, back, end);
  const sg::Program program(sg::RunnableGraph(graph, *world, {}), *world, nullptr, sg::spill_files(folder.path()));
  CHECK(reinterpret_cast<std::uintptr_t>(program.memory().data(there)) % sg::Storage::block_bytes == 0);
  sg::Executor executor({.threads = 1, .waiting_lanes = static_cast<int>(program.num_waiting_lanes())});
  std::vector<std::uint8_t> seen(size);
  for (std::uint8_t run = 1; run < 10; ++run) {
    program.memory().write(start, std::span<const std::uint8_t>(std::vector<std::uint8_t>(size, run)));
    executor.run(program);
    program.memory().read(end, std::span(seen));
    CHECK(std::count(seen.begin(), seen.end(), run) == size);
  }
  program.memory().read(home, std::span(seen));
  CHECK(std::count(seen.begin(), seen.end(), 9) == size);
}

TEST_CASE("steps on a GPU do not leak device memory, captured or not", "[backends][cuda]") {
  sg::testing::need_device();
  for (const bool capture : {false, true}) {
    const auto world = sg::testing::device_world(1, capture);
    sg::Graph graph;
    const sg::Buffer a = buffer(graph, "a", sg::Space::device), b = buffer(graph, "b", sg::Space::device);
    add_copy(graph, "there", sg::LaneKind::h2d, a, b);
    add_copy(graph, "back", sg::LaneKind::d2h, b, a);
    const sg::Program program(graph, *world);
    sg::Executor executor({.threads = 1});
    const auto free_bytes = [] {
      std::size_t free = 0, total = 0;
      REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
      return free;
    };
    for (int run = 0; run < 3; ++run) executor.run(program);
    // Other processes may use the device too; but a leak per step would show in every attempt.
    bool same = false;
    for (int attempt = 0; attempt < 100 && !same; ++attempt) {
      const std::size_t before = free_bytes();
      for (int run = 0; run < 20; ++run) executor.run(program);
      same = free_bytes() == before;
    }
    CHECK(same);
  }
}

TEST_CASE("a host node with memory of the GPU is refused when its program is made", "[backends][cuda][refuses]") {
  const auto world = sg::testing::device_world();
  sg::Graph graph;
  const sg::Buffer x = buffer(graph, "x", sg::Space::device);
  graph.add(
      {.name = "look", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::host), .reads = x, .kind = sg::NodeKind::host},
      [](const sg::Context& c) { static_cast<void>(c.read<std::uint8_t>()[0]); });
  CHECK_THROWS_MATCHES(sg::Program(graph, *world), sg::Error,
                       MessageMatches(ContainsSubstring("rank 0 host 'look' is a host node, but its buffer 'x' is in "
                                                        "device memory")));
}

TEST_CASE("the times of a failed run on a GPU are its own, and none of an earlier run", "[backends][cuda]") {
  const auto world = sg::testing::device_world();
  sg::Graph graph;
  const sg::Buffer a = buffer(graph, "a", sg::Space::device), b = buffer(graph, "b", sg::Space::pinned);
  bool fails = false;
  graph.add({.name = "first", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .writes = a, .device = true},
            [&](const sg::Context& c) {
              if (fails) throw std::runtime_error("not this time");
              if (cudaMemsetAsync(c.write().data(), 1, size, stream_of(c)) != cudaSuccess)
                throw std::runtime_error("cudaMemsetAsync failed");
            });
  add_copy(graph, "out", sg::LaneKind::d2h, a, b);
  graph.add(
      {.name = "look", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::host), .reads = b, .kind = sg::NodeKind::host},
      [] {});
  const sg::Program program(graph, *world);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1});
  sg::Recorder recorder;
  executor.run(program, &recorder);
  for (const sg::NodeTime& time : recorder.timeline().nodes) CHECK(time.ran());
  fails = true;
  CHECK_THROWS_AS(executor.run(program, &recorder), sg::Error);
  for (const sg::NodeTime& time : recorder.timeline().nodes) CHECK(time == sg::NodeTime{});
}

TEST_CASE("issuing a node to a GPU allocates nothing on the host", "[backends][cuda][allocations]") {
  sg::testing::need_device();
  if (!sg::testing::counts_allocations()) SKIP("sanitizers have allocators of their own");
  // Nodes on two streams that wait for each other, with names too long to be kept without an allocation; and, after
  // each of them, a reduction and a copy of two ranks.
  const auto allocations_of_run = [](int num_nodes) {
    const auto world = sg::testing::device_world(2, false);
    sg::Graph graph(2);
    const sg::Buffer x      = buffer(graph, "x", sg::Space::device);
    const sg::Buffer other  = graph.buffer({.name       = "x",
                                            .rank       = sg::Rank{1},
                                            .size_bytes = size,
                                            .type       = sg::DType::u8,
                                            .lifetime   = sg::Lifetime::persistent});
    const sg::Group both    = graph.group({.name = "both", .ranks = {sg::Rank{0}, sg::Rank{1}}});
    const auto add_together = [&](sg::PartOp op, auto reads, auto writes) {
      for (const sg::Buffer mine : {x, other}) {
        const sg::Rank rank = graph.spec(mine).rank;
        graph.add({.name   = "a collective whose name is longer than what a string keeps by itself",
                   .lane   = graph.lane(rank, sg::LaneKind::reduce),
                   .reads  = reads(mine, rank),
                   .writes = writes(mine),
                   .part   = sg::PartSpec{.group = both, .op = op, .type = sg::DType::u8},
                   .kind   = sg::NodeKind::communicate});
      }
    };
    for (int i = 0; i < num_nodes; ++i) {
      add_together(
          sg::PartOp::all_reduce, [](sg::Buffer of, sg::Rank) { return of; }, [](sg::Buffer of) { return of; });
      add_together(
          sg::PartOp::all_gather,
          [](sg::Buffer of, sg::Rank rank) { return of.range(index(rank) * size / 2, size / 2); },
          [](sg::Buffer of) { return of; });
      graph.add({.name        = "a node whose name is longer than what a string keeps by itself",
                 .lane        = graph.lane(sg::Rank{0}, i % 2 == 0 ? sg::LaneKind::compute : sg::LaneKind::h2d),
                 .accumulates = x,
                 .device      = true},
                [](const sg::Context&) {});
    }
    const sg::Program program(graph, *world);
    sg::Executor executor({.threads = 1});
    for (int run = 0; run < 10; ++run) executor.run(program);
    std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
    for (int run = 0; run < 8; ++run) {
      const std::int64_t before = sg::testing::allocations();
      executor.run(program);
      fewest = std::min(fewest, sg::testing::allocations() - before);
    }
    return fewest;
  };
  CHECK(allocations_of_run(500) == allocations_of_run(2));
}

TEST_CASE("an error on a GPU names the node, its stream and the planned memory", "[backends][cuda][refuses]") {
  const auto world = sg::testing::device_world();
  sg::Graph graph;
  SECTION("more memory than there is") {
    const sg::Buffer large = graph.buffer({.name       = "large",
                                           .size_bytes = std::int64_t{1} << 44,
                                           .type       = sg::DType::u8,
                                           .lifetime   = sg::Lifetime::persistent});
    graph.add({.name = "touch", .writes = large, .device = true}, [] {});
    CHECK_THROWS_MATCHES(
        sg::Program(graph, *world), sg::Error,
        MessageMatches(ContainsSubstring("the planned arena of rank 0 needs 17592186044480 bytes on device 0") &&
                       ContainsSubstring("are free")));
  }
  SECTION("a body that fails") {
    const sg::Buffer x = buffer(graph, "x", sg::Space::device);
    graph.add(
        {.name = "mine", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .writes = x, .device = true},
        [](const sg::Context& c) {
          if (cudaMemcpyAsync(nullptr, c.write().data(), size, cudaMemcpyDeviceToDevice, stream_of(c)) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            throw std::runtime_error("cudaMemcpyAsync failed");
          }
        });
    const sg::Program program(graph, *world);
    sg::Executor executor({.threads = 1});
    CHECK_THROWS_MATCHES(executor.run(program), sg::Error,
                         MessageMatches(ContainsSubstring("compute 'mine': cudaMemcpyAsync failed")));
  }
}
#endif
