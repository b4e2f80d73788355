#include "ops/transfers/convert.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdint>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/transfers/collectives.hpp"
#include "tests/support/ops/elements.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

sg::Buffer kept(sg::Graph& graph, std::int64_t count, sg::DType type, int rank = 0) {
  return graph.buffer({.name       = "buffer",
                       .rank       = sg::Rank{rank},
                       .size_bytes = count * static_cast<std::int64_t>(sg::size_bytes(type)),
                       .type       = type,
                       .lifetime   = sg::Lifetime::persistent});
}

// Rounds to `type`.
float rounded(sg::DType type, float value) {
  return type == sg::DType::bf16 ? static_cast<float>(sg::bf16(value)) : static_cast<float>(sg::f16(value));
}

float number(std::size_t i) { return static_cast<float>(static_cast<double>(sg::testing::mix(i) >> 11) * 0x1p-52 - 1); }

}  // namespace

TEST_CASE("a conversion rounds to bf16 or f16 and widens from it, in rows and in one range", "[ops][convert]") {
  constexpr std::int64_t count = 60'060;  // several tiles
  const auto type              = GENERATE(sg::DType::bf16, sg::DType::f16);
  const bool strided           = GENERATE(false, true);
  CAPTURE(type, strided);
  sg::Graph graph;
  const sg::Buffer given = kept(graph, 2 * count, sg::DType::f32), half = kept(graph, 2 * count, type),
                   back = kept(graph, count, sg::DType::f32);
  const sg::Access from = strided ? given.strided(0, 60 * 4, 120 * 4, count / 60) : given.range(0, 4 * count),
                   to   = strided ? half.strided(2002 * 2, 2002 * 2, 4004 * 2, count / 2002) : half.range(0, 2 * count);
  sg::convert(graph, {.name = "narrow", .to = to, .from = from});
  sg::convert(graph, {.name = "widen", .to = back, .from = to});
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  const sg::Program program(graph, world);
  const auto values = program.memory().span<float>(given);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = number(i);
  executor.run(program);
  const auto found  = program.memory().span<float>(back);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::size_t at = strided ? i / 60 * 120 + i % 60 : i;
    if (found[i] != rounded(type, number(at))) ++wrong;
  }
  CHECK(wrong == 0);
  if (strided) CHECK(program.memory().span<sg::bf16>(half)[0].bits() == 0);  // between rows
}

TEST_CASE("an all_reduce of bf16 or f16 adds up in float in rank order and rounds once", "[ops][convert]") {
  const auto type              = GENERATE(sg::DType::bf16, sg::DType::f16);
  const int ranks              = GENERATE(2, 3, 4, 5);
  constexpr std::int64_t count = 5'000;
  CAPTURE(type, ranks);
  sg::Graph graph(ranks);
  std::vector<sg::Rank> all;
  std::vector<sg::Buffer> wide, half;
  for (int rank = 0; rank < ranks; ++rank) {
    all.push_back(sg::Rank{rank});
    wide.push_back(kept(graph, count, sg::DType::f32, rank));
    half.push_back(kept(graph, count, type, rank));
  }
  const sg::Group group = graph.group({.name = "all", .ranks = all});
  const auto of         = [&](const std::vector<sg::Buffer>& buffers) {
    return [&buffers](sg::Rank rank) { return buffers[static_cast<std::size_t>(rank)]; };
  };
  for (const sg::Rank rank : all) {
    const auto i = static_cast<std::size_t>(rank);
    sg::convert(graph, {.name = "narrow", .to = half[i], .from = wide[i]});
  }
  sg::all_reduce(graph, {.name = "sum", .group = group, .in = of(half)});
  for (const sg::Rank rank : all) {
    const auto i = static_cast<std::size_t>(rank);
    sg::convert(graph, {.name = "widen", .to = wide[i], .from = half[i]});
  }
  sg::verify(graph);
  sg::LoopbackWorld world(ranks);
  sg::Executor executor({.threads = 2});
  const sg::Program program(graph, world);
  std::vector<float> expected(count);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto values = program.memory().span<float>(wide[static_cast<std::size_t>(rank)]);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = number(static_cast<std::size_t>(rank) * count + i) * (rank == 0 ? 1.0f : 0x1p-5f);  // bits are lost
      expected[i] += rounded(type, values[i]);
    }
  }
  for (float& each : expected) each = rounded(type, each);
  executor.run(program);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto found = program.memory().span<float>(wide[static_cast<std::size_t>(rank)]);
    CHECK((std::vector<float>(found.begin(), found.end()) == expected));
  }
}

TEST_CASE("a conversion refuses other types and sizes", "[ops][convert][refuses]") {
  sg::Graph graph;
  const sg::Buffer a = kept(graph, 4, sg::DType::f32), b = kept(graph, 5, sg::DType::bf16),
                   c = kept(graph, 4, sg::DType::f64);
  const auto refuses = [&](const sg::Access& to, const sg::Access& from, const std::string& why) {
    CHECK_THROWS_MATCHES(sg::convert(graph, {.name = "x", .to = to, .from = from}), sg::Error,
                         MessageMatches(ContainsSubstring(why)));
  };
  refuses(a, b, "convert 'x': 5 elements into 4 (equal numbers)");
  refuses(c, b, "convert 'x': bf16 to f64 (f32 to bf16 or f16, or one of those to f32)");
  refuses(kept(graph, 5, sg::DType::f16), b, "bf16 to f16");
  refuses(a, a, "f32 to f32");
  refuses(a, b.strided(0, 1, 2, 4), "ranges of 1 bytes are not whole elements of bf16 (a multiple of 2)");
}
