#include "ops/updates/scaled_sum.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/transfers/clear.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

sg::Buffer doubles(sg::Graph& graph, std::int64_t count) {
  return graph.buffer({.size_bytes = 8 * count, .type = sg::DType::f64, .lifetime = sg::Lifetime::persistent});
}

}  // namespace

TEST_CASE("a scaled sum adds in order, and multiplies once", "[ops][scaled_sum]") {
  sg::Graph graph;
  const sg::Buffer values = doubles(graph, 4), sum = doubles(graph, 1);
  sg::scaled_sum(graph, {.name = "sum", .values = values, .to = sum, .factor = 0.5});
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const sg::Program program(graph, world);
  const std::vector<double> given{1e17, 3, -1e17, 8};  // 1e17 + 3 is 1e17: only in this order is the 3 lost
  std::copy(given.begin(), given.end(), program.memory().span<double>(values).begin());
  executor.run(program);
  CHECK(program.memory().span<double>(sum)[0] == 4);
}

TEST_CASE("a scaled sum is divided by the number of targets that count, and 0 without any", "[ops][scaled_sum]") {
  sg::Graph graph;
  const sg::Buffer values = doubles(graph, 2), sum = doubles(graph, 1),
                   ignored =
                       graph.buffer({.size_bytes = 8, .type = sg::DType::i64, .lifetime = sg::Lifetime::persistent});
  sg::scaled_sum(
      graph,
      {.name = "mean", .values = values, .to = sum, .counted = sg::CountedTargets{.all = 10, .ignored = ignored}});
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const sg::Program program(graph, world);
  program.memory().span<double>(values)[0] = 5;
  program.memory().span<double>(values)[1] = 0.25;
  for (const std::int64_t number : {0, 3, 10}) {
    program.memory().span<std::int64_t>(ignored)[0] = number;
    executor.run(program);
    CHECK(program.memory().span<double>(sum)[0] ==
          (number == 10 ? 0 : 5.25 * (1.0 / static_cast<double>(10 - number))));
  }
}

TEST_CASE("a scaled sum refuses to write more than one number", "[ops][scaled_sum][refuses]") {
  sg::Graph graph;
  const sg::Buffer values = doubles(graph, 4), sum = doubles(graph, 2);
  CHECK_THROWS_MATCHES(sg::scaled_sum(graph, {.name = "sum", .values = values, .to = sum}), sg::Error,
                       MessageMatches(ContainsSubstring("scaled_sum: to has 16 bytes of f64 (one f64)")));
}

TEST_CASE("a clear sets the bytes of its range to zero, and no others", "[ops][clear]") {
  sg::Graph graph;
  const sg::Buffer values = graph.buffer({.size_bytes = 12, .lifetime = sg::Lifetime::persistent});
  sg::clear(graph, {.name = "clear", .values = values.range(3, 5)});
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const sg::Program program(graph, world);
  const auto bytes = program.memory().span<std::uint8_t>(values);
  std::fill(bytes.begin(), bytes.end(), std::uint8_t{7});
  executor.run(program);
  CHECK((std::vector<std::uint8_t>(bytes.begin(), bytes.end()) ==
         std::vector<std::uint8_t>{7, 7, 7, 0, 0, 0, 0, 0, 7, 7, 7, 7}));
}
