#include "ops/convert.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <limits>

#include "backends/loopback/world.hpp"
#include "engine/error.hpp"
#include "engine/executor.hpp"
#include "engine/half.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;

TEST_CASE("conversion rounds to the nearest bf16 and back without loss", "[ops][convert]") {
  constexpr std::int64_t count = 50'001;  // several tiles and some elements
  sg::Graph graph;
  const auto make = [&](const char* name, sg::DType type) {
    return graph.buffer({.name       = name,
                         .size_bytes = count * static_cast<std::int64_t>(sg::size_bytes(type)),
                         .type       = type,
                         .lifetime   = sg::Lifetime::persistent});
  };
  const sg::Buffer given = make("given", sg::DType::f32), half = make("half", sg::DType::bf16),
                   back = make("back", sg::DType::f32);
  sg::convert(graph, {.name = "round", .to = half, .from = given});
  sg::convert(graph, {.name = "widen", .lane = std::nullopt, .to = back, .from = half});
  sg::LoopbackWorld world(1);
  sg::Program program(graph, world);
  const auto values = program.memory().span<float>(given);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 1e-3f * static_cast<float>(i) - 7;
  values[3] = std::numeric_limits<float>::infinity();
  sg::Executor executor({.threads = 2});
  executor.run(program);
  int wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    wrong += program.memory().span<sg::bf16>(half)[i].bits() != sg::bf16(values[i]).bits();
    wrong += program.memory().span<float>(back)[i] != static_cast<float>(sg::bf16(values[i]));
  }
  CHECK(wrong == 0);
}

TEST_CASE("conversions that are none are refused", "[ops][convert][refuses]") {
  sg::Graph graph;
  const auto make = [&](std::int64_t bytes, sg::DType type) {
    return graph.buffer({.name = "b", .size_bytes = bytes, .type = type});
  };
  const sg::Buffer f32 = make(8, sg::DType::f32), f64 = make(16, sg::DType::f64), small = make(2, sg::DType::bf16);
  CHECK_THROWS_MATCHES(sg::convert(graph, {.name = "c", .to = f64, .from = f32}), sg::Error,
                       Message("convert 'c': from f32 to f64 (f32 to bf16, or back)"));
  CHECK_THROWS_MATCHES(sg::convert(graph, {.name = "c", .to = small, .from = f32}), sg::Error,
                       Message("convert 'c': 2 elements into room for 1 (as many)"));
}
