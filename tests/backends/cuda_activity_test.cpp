#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <optional>

#include "tests/support/ops/device_case.hpp"

#if defined(STEPGRAPH_WITH_CUDA)
#include "backends/cuda/activity.hpp"
#include "backends/cuda/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "ops/transfers/convert.hpp"
#include "ops/transfers/reduce.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

TEST_CASE("each kernel and copy on a device is recorded, also inside a replayed CUDA graph",
          "[backends][cuda][cupti]") {
  const auto world = sg::testing::device_world();
  sg::Graph graph;
  const auto kept = [&](std::int64_t size_bytes, sg::DType type) {
    return graph.buffer({.size_bytes = size_bytes, .type = type, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer wide = kept(4 << 20, sg::DType::f32), half = kept(2 << 20, sg::DType::bf16),
                   other = kept(4 << 20, sg::DType::f32);
  const sg::Buffer one = kept(8, sg::DType::f64), count = kept(8, sg::DType::f64);
  sg::reduce_into(graph, {.name = "count", .into = count, .from = one});
  constexpr int rounds = 5;
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
  program.memory().set_first(one, 1.0);
  for (int run = 0; run < 6; ++run) {  // issued, captured, replayed, issued again, replayed twice
    CAPTURE(run);
    dynamic_cast<sg::CudaWorld&>(*world).set_capture(run != 3);
    executor.run(program);
    CHECK(program.memory().first<double>(count) == run + 1);  // waits for the device, and is itself a copy
    const auto found = activity->take();
    CHECK(found.size() >= 2 * rounds + 1);
    for (const sg::CudaInterval& each : found) CHECK(each.begin_ns < each.end_ns);
  }
  activity.reset();
  CHECK_NOTHROW(activity.emplace());  // again
}
#endif
