#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <chrono>
#include <cmath>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/executor.hpp"
#include "engine/simulate.hpp"
#include "graphs/shapes.hpp"
#include "tests/support/random_graph.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

// Real runs against simulated ones: graphs whose bodies sleep, so that it does not matter what else the machine does,
// on an executor of two threads. The order in which workers take nodes must be right for the times to agree.
namespace {

constexpr int threads  = 2;
constexpr double flops = 1e3;  // one flop is a millisecond

// A node that sleeps as long as it is simulated to take.
void sleeper(sg::Graph& graph, double milliseconds, sg::NodeSpec spec = {}) {
  spec.cost.flops = milliseconds;
  if (!spec.lane && !spec.rank) spec.rank = sg::Rank{0};
  graph.add(spec,
            [milliseconds] { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds)); });
}

double measured_s(sg::Executor& executor, const sg::Program& program) {
  const auto begin = std::chrono::steady_clock::now();
  executor.run(program);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The best of three attempts: load can only make a run longer or, at ties, order it differently.
void check_agrees(const sg::Graph& graph) {
  const double simulated_s = simulate(graph, sg::loopback_machine({.ranks   = graph.num_ranks(),
                                                                   .threads = threads,
                                                                   .rates   = {.compute = {.flops_per_s = flops}}}))
                                 .makespan_s;
  sg::LoopbackWorld world(graph.num_ranks());
  sg::Executor executor({.threads = threads});
  const sg::Program program(graph, world);
  const double tolerance = sg::testing::scale() > 1 ? 0.5 : 0.1;  // sanitized code is slow to wake up
  double error = 1, best_s = 0;
  for (int attempt = 0; attempt < 3 && error > tolerance; ++attempt) {
    const double run_s = measured_s(executor, program);
    const double off   = std::abs(run_s - simulated_s) / simulated_s;
    if (off < error) best_s = run_s;
    error = std::min(error, off);
  }
  CAPTURE(simulated_s, best_s);
  CHECK(error <= tolerance);
}

}  // namespace

TEST_CASE("a simulated fork and join takes as long as a real one", "[engine][simulate][reality]") {
  sg::Graph graph;
  const sg::Buffer start = graph.token(sg::Rank{0});
  sleeper(graph, 10, {.writes = {start}});
  std::vector<sg::Buffer> done;
  sg::AccessList all;
  // The worker of the fork goes on with the last, 80 ms; the other takes the rest. In order it would be 120 ms, not 80.
  for (const double milliseconds : {15, 20, 25, 20, 80}) {
    done.push_back(graph.token(sg::Rank{0}));
    all.push_back(done.back());
    sleeper(graph, milliseconds, {.reads = {start}, .writes = {done.back()}});
  }
  sleeper(graph, 20, {.reads = all});
  check_agrees(graph);
}

TEST_CASE("simulated chains of different lengths take as long as real ones", "[engine][simulate][reality]") {
  sg::Graph graph(4);
  const int lengths[] = {12, 2, 5, 9};
  for (int rank = 0; rank < 4; ++rank) {
    for (int i = 0; i < lengths[rank]; ++i)
      sleeper(graph, 5 + rank, {.lane = graph.lane(sg::Rank{rank}, sg::LaneKind::compute)});
  }
  check_agrees(graph);
}

TEST_CASE("a simulated pipeline takes as long as a real one", "[engine][simulate][reality]") {
  const int stages = 3, microbatches = 6;
  sg::Graph graph(stages);
  std::vector<sg::Group> hops;
  for (int stage = 0; stage + 1 < stages; ++stage)
    hops.push_back(graph.group({.ranks = {sg::Rank{stage}, sg::Rank{stage + 1}}}));
  for (int i = 0; i < microbatches; ++i) {
    sg::Buffer in = graph.buffer({.size_bytes = 4, .lifetime = sg::Lifetime::persistent});
    for (int stage = 0; stage < stages; ++stage) {
      const sg::Rank here{stage}, next{stage + 1};
      const sg::Buffer out = graph.buffer({.rank = here, .size_bytes = 4});
      sleeper(graph, 8 + stage, {.lane = graph.lane(here, sg::LaneKind::compute), .reads = {in}, .writes = {out}});
      if (stage + 1 == stages) break;
      in              = graph.buffer({.rank = next, .size_bytes = 4});
      const auto part = [&](sg::PartOp op, sg::Rank peer) {
        return sg::PartSpec{
            .group = hops[static_cast<std::size_t>(stage)], .op = op, .type = sg::DType::u8, .peer = peer};
      };
      graph.add(
          {.lane = graph.lane(here, sg::LaneKind::pp_send), .reads = {out}, .part = part(sg::PartOp::send, next)});
      graph.add(
          {.lane = graph.lane(next, sg::LaneKind::pp_recv), .writes = {in}, .part = part(sg::PartOp::recv, here)});
    }
  }
  check_agrees(graph);
}

TEST_CASE("simulated random graphs take as long as real ones", "[engine][simulate][reality]") {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    CAPTURE(seed);
    sg::testing::Random random(seed);
    const sg::Shape shape = sg::random_dag(30, 45, seed);
    sg::Graph graph;
    auto edge = shape.edges.begin();
    std::vector<sg::Buffer> written;
    for (std::uint32_t node = 0; node < shape.num_nodes; ++node) {
      sg::NodeSpec spec;
      for (; edge != shape.edges.end() && edge->second == node; ++edge) spec.reads.push_back(written[edge->first]);
      written.push_back(graph.token(sg::Rank{0}));
      spec.writes.push_back(written.back());
      sleeper(graph, static_cast<double>(random.between(2, 12)) + 0.1 * node, spec);
    }
    check_agrees(graph);
  }
}
