#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "ops/clear.hpp"
#include "tests/support/device_case.hpp"

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
