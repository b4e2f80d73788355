// A GPU that does not finish a step: time-outs, cancel and destructors must not wait for it.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#if defined(STEPGRAPH_WITH_CUDA)
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/device.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/ops/device_case.hpp"

namespace sg = stepgraph;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

// Work that keeps a stream busy until it is let go.
struct Gate {
  std::atomic<bool> open{false};
  static void CUDART_CB wait(void* gate) {
    while (!static_cast<Gate*>(gate)->open) std::this_thread::sleep_for(1ms);
  }
};

// "first" is done at once, "stuck" waits for the gate, "last" follows it on another lane.
sg::Graph stuck_graph(Gate& gate) {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 1024, .space = sg::Space::device});
  const auto add     = [&](const char* name, sg::LaneKind lane, const auto& body) {
    graph.add({.name = name, .lane = graph.lane(sg::Rank{0}, lane), .accumulates = x, .device = true}, body);
  };
  const auto clear = [](const sg::Context& c) {
    const auto stream = static_cast<cudaStream_t>(c.device()->stream);
    if (cudaMemsetAsync(c.accumulate().data(), 0, 1024, stream) != cudaSuccess) throw std::runtime_error("no memset");
  };
  add("first", sg::LaneKind::compute, clear);
  add("stuck", sg::LaneKind::compute, [&gate](const sg::Context& c) {
    const auto stream = static_cast<cudaStream_t>(c.device()->stream);
    if (cudaLaunchHostFunc(stream, Gate::wait, &gate) != cudaSuccess) throw std::runtime_error("no host function");
  });
  add("last", sg::LaneKind::d2h, clear);
  return graph;
}

constexpr sg::ExecutorOptions short_drain{.threads = 1, .drain_timeout = 200ms};

}  // namespace

TEST_CASE("a step that the GPU does not finish ends with an error", "[backends][cuda][timeout]") {
  const bool capture = GENERATE(false, true);
  auto world         = sg::testing::device_world(1, capture);
  // The GPU is let go at the end of the test, but it may still use what it was given.
  static Gate gates[2];
  Gate& gate = gates[capture ? 1 : 0];
  {
    auto program = std::make_unique<sg::Program>(stuck_graph(gate), *world);
    if (capture) {  // a run that is captured and one that is replayed, both good
      gate.open = true;
      sg::Executor executor({.threads = 1});
      for (int i = 0; i < 3; ++i) executor.run(*program);
      gate.open = false;
    }
    auto executor = std::make_unique<sg::Executor>(short_drain);
    sg::Run run   = executor->start(*program);
    for (int i = 0; i < 100; ++i) {
      CHECK_FALSE(run.done());
      std::this_thread::sleep_for(1ms);
    }
    run.cancel("not needed");
    // A captured step is one launch, so its lanes are not known.
    const char* const where = capture ? "its work was still not done" : "have not finished: rank 0 compute";
    CHECK_THROWS_MATCHES(run.get(), sg::Error,
                         MessageMatches(ContainsSubstring("not needed") && ContainsSubstring(where)));
    CHECK(run.done());
    CHECK_THROWS_AS(executor->start(*program), sg::Error);
    CHECK_THROWS_MATCHES(sg::Program(stuck_graph(gate), *world), sg::Error,
                         MessageMatches(ContainsSubstring("has not finished in time")));
  }
  world.reset();  // no destructor waits
  gate.open = true;
  CHECK(cudaDeviceSynchronize() == cudaSuccess);

  // Another world works on the same GPU.
  world = sg::testing::device_world(1, capture);
  const sg::Program good(stuck_graph(gate), *world);
  CHECK_NOTHROW(sg::Executor({.threads = 1}).run(good));
}

TEST_CASE("a stall on the GPU is noticed while earlier nodes count", "[backends][cuda][timeout]") {
  auto world = sg::testing::device_world(1, false);
  static Gate gate;
  {
    const sg::Program program(stuck_graph(gate), *world);
    sg::Executor executor({.threads = 1, .stall_timeout = 200ms, .drain_timeout = 200ms});
    CHECK_THROWS_MATCHES(executor.run(program), sg::Error,
                         MessageMatches(ContainsSubstring("no node has ended for 200 ms")));
  }
  world.reset();
  gate.open = true;
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

#endif
