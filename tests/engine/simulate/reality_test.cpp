#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <utility>

#include "backends/loopback/world.hpp"
#include "engine/run/executor.hpp"
#include "engine/simulate/simulate.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/graphs/rebuild.hpp"
#include "tests/support/scale.hpp"
#include "tools/bench/overhead/shapes.hpp"

namespace sg = stepgraph;

// Compares real runs with simulated ones: graphs whose bodies sleep, on an executor of two threads. On a loaded machine
// a sleep takes longer than requested, so the simulation uses the measured durations. The test compares which node runs
// when, on which worker and after which others.
namespace {

constexpr int threads = 2;

// A graph of sleeping nodes, and the times at which they slept.
class Sleepers {
 public:
  explicit Sleepers(int num_ranks = 1) : graph(num_ranks) {}

  void add(double milliseconds, sg::NodeSpec spec = {}) {
    if (!spec.lane && !spec.rank) spec.rank = sg::Rank{0};
    spec.cost.flops = milliseconds / 1e3;  // at one a second
    spans_.resize(graph.num_nodes() + 1);
    graph.add(spec, [this, id = graph.num_nodes(), milliseconds] {
      spans_[id].first = Clock::now();
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
      spans_[id].second = Clock::now();
    });
  }

  // The time from the first begin to the last end.
  double run(sg::Executor& executor, const sg::Program& program) {
    spans_.assign(graph.num_nodes(), {});
    executor.run(program);
    Clock::time_point first = Clock::time_point::max(), last = Clock::time_point::min();
    for (const auto& [begin, end] : spans_) {
      if (begin == Clock::time_point()) continue;  // a part: it does not sleep
      first = std::min(first, begin);
      last  = std::max(last, end);
    }
    return seconds(last - first);
  }

  // With the declared durations.
  [[nodiscard]] double predicted_s(sg::PoolOrder order = sg::PoolOrder::work_stealing) const {
    return simulate(graph, machine(order)).makespan_s;
  }

  // With the measured durations of the last run.
  [[nodiscard]] double simulated_s() const {
    const sg::Graph slept = sg::testing::rebuild(graph, [&](sg::Node node, sg::NodeSpec& spec) {
      spec.cost.flops = seconds(spans_[node.id].second - spans_[node.id].first);
    });
    return simulate(slept, machine(sg::PoolOrder::work_stealing)).makespan_s;
  }

  sg::Graph graph;

 private:
  [[nodiscard]] sg::Machine machine(sg::PoolOrder order) const {
    sg::Machine chosen = sg::loopback_machine(
        {.ranks = graph.num_ranks(), .threads = threads, .rates = {.compute = {.flops_per_s = 1}}});
    if (order == sg::PoolOrder::first_ready) chosen.bind({}, chosen.pool({.workers = threads, .order = order}));
    return chosen;
  }

  using Clock = std::chrono::steady_clock;
  static double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

  std::vector<std::pair<Clock::time_point, Clock::time_point>> spans_;  // by node; each body writes its own
};

// At least one of ten attempts must agree: the OS may delay a thread between two nodes.
void check_agrees(Sleepers& sleepers) {
  sg::LoopbackWorld world(sleepers.graph.num_ranks());
  sg::Executor executor({.threads = threads});
  const sg::Program program(sleepers.graph, world);
  const double tolerance = sg::testing::scale() > 1 ? 0.5 : 0.1;  // sanitized code is slow to wake up
  double real_s = 0, simulated_s = 0, error = 1;
  for (int attempt = 0; attempt < 10 && error > tolerance; ++attempt) {
    real_s      = sleepers.run(executor, program);
    simulated_s = sleepers.simulated_s();
    error       = std::abs(simulated_s - real_s) / real_s;
  }
  CAPTURE(real_s, simulated_s, sleepers.predicted_s());
  CHECK(error <= tolerance);
  // On an idle machine, sleeps take as long as declared. STEPGRAPH_TEST_QUIET checks that too.
  if (std::getenv("STEPGRAPH_TEST_QUIET")) {
    WARN("predicted " << sleepers.predicted_s() << " s, took " << real_s << " s");
    CHECK(std::abs(sleepers.predicted_s() / real_s - 1) <= 0.1);
  }
}

}  // namespace

TEST_CASE("a simulated fork and join takes as long as a real one", "[engine][simulate][reality]") {
  Sleepers sleepers;
  sg::Graph& graph       = sleepers.graph;
  const sg::Buffer start = graph.token(sg::Rank{0});
  sleepers.add(10, {.writes = {start}});
  std::vector<sg::Buffer> done;
  sg::AccessList all;
  // The worker of the fork continues with the last node, 80 ms; the other worker takes the rest. In order it would be
  // 120 ms, not 80.
  for (const double milliseconds : {15, 20, 25, 20, 80}) {
    done.push_back(graph.token(sg::Rank{0}));
    all.push_back(done.back());
    sleepers.add(milliseconds, {.reads = {start}, .writes = {done.back()}});
  }
  sleepers.add(20, {.reads = all});
  check_agrees(sleepers);
  CHECK(sleepers.predicted_s(sg::PoolOrder::first_ready) > 1.15 * sleepers.predicted_s());
}

TEST_CASE("simulated chains of different lengths take as long as real ones", "[engine][simulate][reality]") {
  Sleepers sleepers(4);
  sg::Graph& graph    = sleepers.graph;
  const int lengths[] = {12, 2, 5, 9};
  for (int rank = 0; rank < 4; ++rank) {
    for (int i = 0; i < lengths[rank]; ++i)
      sleepers.add(5 + rank, {.lane = graph.lane(sg::Rank{rank}, sg::LaneKind::compute)});
  }
  check_agrees(sleepers);
}

TEST_CASE("a simulated pipeline takes as long as a real one", "[engine][simulate][reality]") {
  const int stages = 3, microbatches = 6;
  Sleepers sleepers(stages);
  sg::Graph& graph = sleepers.graph;
  std::vector<sg::Group> hops;
  for (int stage = 0; stage + 1 < stages; ++stage)
    hops.push_back(graph.group({.ranks = {sg::Rank{stage}, sg::Rank{stage + 1}}}));
  for (int i = 0; i < microbatches; ++i) {
    sg::Buffer in = graph.buffer({.size_bytes = 4, .lifetime = sg::Lifetime::persistent});
    for (int stage = 0; stage < stages; ++stage) {
      const sg::Rank here{stage}, next{stage + 1};
      const sg::Buffer out = graph.buffer({.rank = here, .size_bytes = 4});
      sleepers.add(8 + stage, {.lane = graph.lane(here, sg::LaneKind::compute), .reads = {in}, .writes = {out}});
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
  check_agrees(sleepers);
}

TEST_CASE("simulated random graphs take as long as real ones", "[engine][simulate][reality]") {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    CAPTURE(seed);
    sg::testing::Random random(seed);
    const sg::Shape shape = sg::random_dag(30, 45, seed);
    Sleepers sleepers;
    sg::Graph& graph = sleepers.graph;
    auto edge        = shape.edges.begin();
    std::vector<sg::Buffer> written;
    for (std::uint32_t node = 0; node < shape.num_nodes; ++node) {
      sg::NodeSpec spec;
      for (; edge != shape.edges.end() && edge->second == node; ++edge) spec.reads.push_back(written[edge->first]);
      written.push_back(graph.token(sg::Rank{0}));
      spec.writes.push_back(written.back());
      sleepers.add(static_cast<double>(random.between(2, 12)) + 0.1 * node, spec);
    }
    check_agrees(sleepers);
  }
}
