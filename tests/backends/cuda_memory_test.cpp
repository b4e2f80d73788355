#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "ops/transfers/clear.hpp"
#include "ops/transfers/offload_copy.hpp"
#include "tests/support/ops/device_case.hpp"

#if defined(STEPGRAPH_WITH_CUDA)
#include "backends/cuda/devices.hpp"
#include "backends/cuda/world.hpp"
#endif

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

TEST_CASE("a plan too large for a device is refused with planned and free bytes, and the next program runs",
          "[backends][cuda][refuses]") {
  const auto world      = sg::testing::device_world();
  const auto graph_with = [](std::int64_t size_bytes) {
    sg::Graph graph;
    const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = size_bytes, .lifetime = sg::Lifetime::persistent});
    sg::clear(graph, {.name = "clear", .values = x});
    return graph;
  };
  const sg::Graph large = graph_with(std::int64_t{1} << 50);
  CHECK_THROWS_MATCHES(sg::Program(sg::RunnableGraph(large, sg::plan_memory(large)), *world), sg::Error,
                       MessageMatches(ContainsSubstring("cuda: the planned arena of rank 0 needs 1125899906842688 "
                                                        "bytes on device 0; of its ") &&
                                      ContainsSubstring(" are free (")));
  const sg::Graph small = graph_with(1 << 20);
  const sg::Program program(small, *world);
  sg::Executor executor({.threads = 1});
  CHECK_NOTHROW(executor.run(program));
}

TEST_CASE("the memory of a device is known, and ranks that share it have equal parts", "[backends][cuda][offload]") {
  const auto one = sg::testing::device_world(1), two = sg::testing::device_world(2);
  const std::int64_t all = sg::device_memory_bytes(*one);
  CHECK(all > std::int64_t{1} << 30);
  CHECK(sg::device_memory_bytes(*two) == all / 2);
#if defined(STEPGRAPH_WITH_CUDA)
  // The driver keeps a little.
  CHECK(static_cast<double>(all) > 0.9 * static_cast<double>(sg::cuda_devices().front().memory_bytes));
#endif
}

TEST_CASE("host memory can be pageable: copies both ways have the same bytes", "[backends][cuda][offload]") {
  sg::testing::need_device();
#if defined(STEPGRAPH_WITH_CUDA)
  sg::CudaWorld world(1, {.pinned = false});
  sg::Graph graph;
  constexpr std::int64_t size = 3 << 20;
  const auto buffer           = [&](const char* name, sg::Space space) {
    return graph.buffer({.name = name, .size_bytes = size, .space = space, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer from = buffer("from", sg::Space::pinned), slot = buffer("slot", sg::Space::device),
                   to = buffer("to", sg::Space::pinned);
  sg::offload_copy(graph, {.name = "up", .lane = sg::LaneKind::h2d, .to = slot, .from = from});
  sg::offload_copy(graph, {.name = "down", .lane = sg::LaneKind::d2h, .to = to, .from = slot});
  const sg::Program program(graph, world);
  sg::Executor executor({.threads = 1});
  for (int run = 0; run < 3; ++run) {  // nothing is captured
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(run));
    program.memory().write(from, std::span<const std::byte>(bytes));
    executor.run(program);
    std::vector<std::byte> found(size);
    program.memory().read(to, std::span<std::byte>(found));
    CHECK(found == bytes);
  }
#endif
}

TEST_CASE("large pinned memory is zeroed, also where another program has used it", "[backends][cuda][offload]") {
  const auto world = sg::testing::device_world();
  sg::Graph graph;
  constexpr std::int64_t size = (std::int64_t{80} << 20) + 64;  // large pages are used from 64 MiB on
  const auto buffer           = [&](const char* name, sg::Space space) {
    return graph.buffer({.name = name, .size_bytes = size, .space = space, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer from = buffer("from", sg::Space::pinned), slot = buffer("slot", sg::Space::device),
                   to = buffer("to", sg::Space::pinned);
  sg::offload_copy(graph, {.name = "up", .lane = sg::LaneKind::h2d, .to = slot, .from = from});
  sg::offload_copy(graph, {.name = "down", .lane = sg::LaneKind::d2h, .to = to, .from = slot});
  sg::Executor executor({.threads = 1});
  const std::vector<std::byte> zeros(size);
  for (int program_number = 0; program_number < 2; ++program_number) {
    const sg::Program program(graph, *world);
    for (const sg::Buffer each : {from, to}) {
      std::vector<std::byte> found(size, std::byte{1});
      program.memory().read(each, std::span<std::byte>(found));
      CHECK(found == zeros);
    }
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + 3);
    program.memory().write(from, std::span<const std::byte>(bytes));
    for (int run = 0; run < 3; ++run) executor.run(program);
    std::vector<std::byte> found(size);
    program.memory().read(to, std::span<std::byte>(found));
    CHECK(found == bytes);
  }
}
