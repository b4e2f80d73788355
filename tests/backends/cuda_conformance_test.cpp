// The conformance suite on a CUDA device, and the cases that a device once got wrong, one by one.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#if defined(STEPGRAPH_WITH_CUDA)
#include <algorithm>
#include <array>
#include <chrono>
#include <span>

#include "backends/cuda/world.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/conformance/world_conformance_check.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

TEST_CASE("a CUDA world passes the conformance suite, in rank order", "[backends][cuda][conformance]") {
  sg::testing::need_device();
  const bool capture = GENERATE(true, false);
  CAPTURE(capture);
  sg::testing::world_conformance([&](int ranks) { return sg::CudaWorld(ranks, {.capture = capture}); },
                                 {.rank_order   = true,
                                  .large_bytes  = (4 << 20) / sg::testing::scale() / sg::testing::scale(),
                                  .num_random   = sg::testing::cases(4),
                                  .step_timeout = std::chrono::seconds(60) * sg::testing::scale()});
}

TEST_CASE("a CUDA world of several logical devices passes the conformance suite", "[backends][cuda][conformance]") {
  sg::testing::need_device();
  for (const int ranks : {2, 5, 8}) {
    for (const bool capture : {true, false}) {
      CAPTURE(ranks, capture);
      sg::CudaWorld world(ranks, {.devices = {0, 0}, .capture = capture});
      CHECK(
          sg::testing::world_conformance(world, {.rank_order  = true,
                                                 .large_bytes = (4 << 20) / sg::testing::scale() / sg::testing::scale(),
                                                 .num_random  = sg::testing::cases(4),
                                                 .step_timeout = std::chrono::seconds(60) * sg::testing::scale()}) ==
          std::vector<std::string>{});
    }
  }
}

TEST_CASE("an all-reduce on a CUDA device reduces every byte of rows that cut elements", "[backends][cuda]") {
  const auto world = sg::testing::device_world(2);
  sg::Graph graph(2);
  const sg::Group group = graph.group({.name = "both", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  std::vector<sg::Buffer> bytes;
  for (const sg::Rank rank : {sg::Rank{0}, sg::Rank{1}}) {
    bytes.push_back(graph.buffer({.name       = "bytes",
                                  .rank       = rank,
                                  .size_bytes = 16,
                                  .type       = sg::DType::u8,
                                  .lifetime   = sg::Lifetime::persistent}));
    graph.add({.name        = "sum",
               .lane        = graph.lane(rank, sg::LaneKind::reduce),
               .accumulates = bytes.back().strided(0, 6, 8, 2),
               .part        = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce, .type = sg::DType::f32}});
  }
  const sg::Program program(graph, *world);
  // Three floats in 12 bytes: the second one is cut in the middle.
  const auto image = [](float a, float b, float c) {
    const std::array<float, 3> values{a, b, c};
    std::array<std::byte, 16> out{};
    const auto packed = std::as_bytes(std::span(values));
    std::copy(packed.begin(), packed.begin() + 6, out.begin());
    std::copy(packed.begin() + 6, packed.end(), out.begin() + 8);
    return out;
  };
  sg::Executor executor({.threads = 1});
  for (int run = 0; run < 3; ++run) {
    program.memory().write(bytes[0], std::span<const std::byte>(image(1, 2, 3)));
    program.memory().write(bytes[1], std::span<const std::byte>(image(10, 20, 30)));
    executor.run(program);
    for (const sg::Buffer each : bytes) {
      std::array<std::byte, 16> found{};
      program.memory().read(each, std::span<std::byte>(found));
      CHECK(found == image(11, 22, 33));
    }
  }
}
#endif
