// Two unordered nodes write the same variable without declaring it; with `declared` they declare it, and the graph
// orders them. ThreadSanitizer must report the first and not the second. With `leak`, the program leaks memory.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/run/executor.hpp"

namespace sg = stepgraph;

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "leak") == 0) {
    static int* volatile lost = new int(1);
    std::printf("%d\n", *lost);
    lost = nullptr;
    return 0;
  }
  const bool declared = argc > 1 && std::strcmp(argv[1], "declared") == 0;
  long shared         = 0;
  std::atomic<int> arrived{0};  // relaxed: makes the two bodies meet without ordering them
  sg::Graph graph;
  const sg::Buffer token = graph.token(sg::Rank{0});
  for (int i = 0; i < 2; ++i) {
    sg::NodeSpec node{.name = "racy", .rank = sg::Rank{0}};
    if (declared) node.accumulates = {token};
    graph.add(node, [&, declared] {
      arrived.fetch_add(1, std::memory_order_relaxed);
      while (!declared && arrived.load(std::memory_order_relaxed) % 2 != 0) std::this_thread::yield();
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
