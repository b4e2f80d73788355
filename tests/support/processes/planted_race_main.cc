// Two unordered nodes write the same variable without declaring it: by themselves, or with `reduce` or `product` in a
// loop that is compiled without ThreadSanitizer. With `declared` they declare it, and the graph orders them.
// ThreadSanitizer must report all but the last. With `leak`, the program leaks memory.
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <span>
#include <string_view>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/base/arithmetic.hpp"
#include "engine/run/executor.hpp"
#include "ops/cpu/gemm/gemm.hpp"

namespace sg = stepgraph;

namespace {

void add_one(float& value) {
  const float one = 1;
  sg::reduce_into(std::as_writable_bytes(std::span(&value, 1)), std::as_bytes(std::span(&one, 1)), sg::DType::f32,
                  sg::Reduction::sum);
}

void multiply(float& value) {
  const float one = 1;
  const sg::Matrix<float> a{.data = &one, .row_stride = 1};
  sg::gemm_tiles(sg::Gemm<float>{.m = 1, .n = 1, .k = 1, .a = a, .b = a, .c = {&value, nullptr, 1}, .c_stride = 1}, 0, 1,
                 sg::GemmKernel::fastest);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "leak") {
    static int* volatile lost = new int(1);
    std::printf("%d\n", *lost);
    lost = nullptr;
    return 0;
  }
  const bool declared = mode == "declared";
  long shared         = 0;
  float value         = 0;
  std::atomic<int> arrived{0};  // relaxed: makes the two bodies meet without ordering them
  sg::Graph graph;
  const sg::Buffer token = graph.token(sg::Rank{0});
  for (int i = 0; i < 2; ++i) {
    sg::NodeSpec node{.name = "racy", .rank = sg::Rank{0}};
    if (declared) node.accumulates = {token};
    graph.add(node, [&] {
      arrived.fetch_add(1, std::memory_order_relaxed);
      while (!declared && arrived.load(std::memory_order_relaxed) % 2 != 0) std::this_thread::yield();
      if (mode == "reduce")
        add_one(value);
      else if (mode == "product")
        multiply(value);
      else
        ++shared;
    });
  }
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  const sg::Program program(graph, world);
  for (int i = 0; i < 20; ++i) executor.run(program);
  std::printf("%s\n", declared && shared != 2 * 20 ? "wrong" : "done");
  return 0;
}
