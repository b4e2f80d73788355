#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <optional>

#include "tests/support/device_case.hpp"

#if defined(STEPGRAPH_WITH_CUDA)
#include "backends/cuda/activity.hpp"
#include "engine/error.hpp"
#include "engine/executor.hpp"
#include "ops/convert.hpp"
#include "ops/reduce.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

TEST_CASE("what ran on a device is recorded piece by piece, also where a step is replayed as one", "[backends][cuda]") {
  const auto world = sg::testing::device_world();
  sg::Graph graph;
  const auto kept = [&](std::int64_t size_bytes, sg::DType type) {
    return graph.buffer({.size_bytes = size_bytes, .type = type, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer wide = kept(4 << 20, sg::DType::f32), half = kept(2 << 20, sg::DType::bf16),
                   other = kept(4 << 20, sg::DType::f32);
  constexpr int rounds   = 5;
  for (int i = 0; i < rounds; ++i) {
    sg::convert(graph, {.name = "round", .to = half, .from = wide});
    sg::copy(graph, {.name = "copy", .to = other, .from = wide});
  }
  const sg::Program program(graph, *world);
  sg::Executor executor({.threads = 1});
  std::optional<sg::CudaActivity> activity;
  try {
    activity.emplace();
  } catch (const sg::Error& error) {
    SKIP(error.what());
  }
  CHECK_THROWS_MATCHES(sg::CudaActivity(), sg::Error, MessageMatches(ContainsSubstring("one at a time")));
  static_cast<void>(activity->take());
  for (int run = 0; run < 4; ++run) {  // as it is, captured, replayed twice
    CAPTURE(run);
    executor.run(program);
    static_cast<void>(program.memory().first<float>(other));  // waits, and is a copy itself
    const auto found = activity->take();
    CHECK(found.size() >= 2 * rounds);
    for (const sg::CudaInterval& each : found) CHECK(each.begin_ns < each.end_ns);
  }
  activity.reset();
  CHECK_NOTHROW(activity.emplace());  // again
}
#endif
