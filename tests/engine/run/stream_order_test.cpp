// The operations that a program issues to a device, host nodes included, keep the order that its accesses need. They
// are judged by the rules of streams and events alone (tests/support/worlds/stream_log_world.hpp).
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/run/executor.hpp"
#include "tests/support/random_graph.hpp"
#include "tests/support/rebuild.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/worlds/stream_log_world.hpp"

namespace sg = stepgraph;
using sg::testing::Random;

namespace {

// A random graph, with some host nodes on lanes of all kinds and on none.
sg::Graph draw_graph(int seed, int ranks, int percent_host, int* num_host = nullptr) {
  Random random(static_cast<std::uint64_t>(seed));
  const sg::Graph drawn =
      sg::testing::random_graph(static_cast<std::uint64_t>(seed),
                                {.max_ranks = ranks, .min_nodes = 10, .max_nodes = 60, .max_buffers_per_rank = 4});
  return sg::testing::rebuild(drawn, [&](sg::Node, sg::NodeSpec& node) {
    if (node.part || !random.chance(percent_host)) return;
    node.kind = sg::NodeKind::host;
    if (num_host != nullptr) ++*num_host;
  });
}

struct Judged {
  std::string unordered;
  int num_pairs = 0;
  sg::StreamPlan plan;
};

// Runs the graph twice and judges what was issued. `change` may break the plan.
Judged judge(const sg::Graph& graph, const std::function<void(sg::StreamPlan&)>& change = {}) {
  Judged out;
  sg::testing::StreamLogWorld world(graph.num_ranks(), [&](sg::StreamPlan& plan) {
    out.plan = plan;
    if (change) change(plan);
  });
  const sg::RunnableGraph runnable(graph, world, {.reuse = sg::Reuse::tight});
  const sg::Program program(runnable, world);
  sg::Executor executor({.threads = 1, .waiting_lanes = static_cast<int>(program.num_waiting_lanes())});
  for (int run = 0; run < 2; ++run) executor.run(program);
  out.unordered = world.log().find_unordered(*runnable.memory(), &out.num_pairs);
  return out;
}

void drop_wait(sg::StreamPlan& plan, std::size_t wait, bool loop) {
  auto& all   = loop ? plan.loop_waits : plan.waits;
  auto& begin = loop ? plan.loop_begin : plan.wait_begin;
  all.erase(all.begin() + static_cast<std::ptrdiff_t>(wait));
  for (std::uint32_t& each : begin) each -= each > wait;
}

}  // namespace

TEST_CASE("what is issued to streams and done by host nodes keeps every order that accesses need",
          "[engine][streams][device]") {
  int num_host = 0, num_pairs = 0;
  for (int seed = 1; seed <= sg::testing::cases(60); ++seed) {
    CAPTURE(seed);
    const Judged found = judge(draw_graph(seed, 3, 15, &num_host));
    CHECK(found.unordered == "");
    num_pairs += found.num_pairs;
  }
  CHECK(num_host > sg::testing::at_least(150));
  CHECK(num_pairs > sg::testing::at_least(5'000));
}

namespace {

struct Dropped {
  int num_dropped = 0, num_loop = 0, num_noticed = 0;
};
// Drops some waits of random graphs, one at a time.
Dropped drop_waits(int num_graphs, int ranks, int percent_host) {
  Dropped out;
  for (int seed = 1; seed <= num_graphs; ++seed) {
    const sg::Graph graph     = draw_graph(seed, ranks, percent_host);
    const sg::StreamPlan plan = judge(graph).plan;
    for (const bool loop : {false, true}) {
      const std::size_t count = (loop ? plan.loop_waits : plan.waits).size();
      for (std::size_t i = 0; i < count; i += 1 + count / 3) {
        const auto found = judge(graph, [&](sg::StreamPlan& broken) { drop_wait(broken, i, loop); });
        out.num_noticed += !found.unordered.empty();
        ++out.num_dropped;
        out.num_loop += loop;
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("without any one of its waits a program on streams breaks an order that accesses need",
          "[engine][streams][device]") {
  const Dropped found = drop_waits(sg::testing::cases(40), 1, 0);
  CHECK(found.num_noticed == found.num_dropped);
  CHECK(found.num_dropped >= sg::testing::at_least(60));
  CHECK(found.num_loop >= sg::testing::at_least(20));
}

TEST_CASE("most waits of a program are also needed beside other ranks and host nodes, which can order nodes by chance",
          "[engine][streams][device]") {
  const Dropped found = drop_waits(sg::testing::cases(16), 3, 15);
  CHECK(4 * found.num_noticed > 3 * found.num_dropped);
  CHECK(found.num_dropped >= sg::testing::at_least(40));
}

TEST_CASE("a node that follows a host node is issued when that has ended", "[engine][streams][device]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8, .space = sg::Space::pinned});
  const auto lane    = [&](sg::LaneKind kind) { return graph.lane(sg::Rank{0}, kind); };
  graph.add({.name = "make", .lane = lane(sg::LaneKind::compute), .writes = x});
  graph.add({.name = "look", .lane = lane(sg::LaneKind::host), .accumulates = x, .kind = sg::NodeKind::host});
  graph.add({.name = "use", .lane = lane(sg::LaneKind::compute), .reads = x});
  CHECK(judge(graph).unordered == "");
  // Without the wait of the host for `make`, it would look too early.
  CHECK(judge(graph, [](sg::StreamPlan& plan) { drop_wait(plan, 0, false); }).unordered ==
        "rank 0 compute 'make' and rank 0 host 'look' of one run");
}
