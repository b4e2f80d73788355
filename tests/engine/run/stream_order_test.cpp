// The operations that a program issues to a device, host nodes included, keep the order that its accesses need. They
// are judged by the rules of streams and events alone (tests/support/worlds/stream_log_world.hpp).
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/graphs/rebuild.hpp"
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
  std::string unordered, unproved;  // what the log finds, and what verify_streams says
  int num_pairs = 0;
  sg::StreamPlan plan;
};

// Runs the graph twice and judges what was issued. `options.change` may break the plan.
Judged judge(const sg::Graph& graph, sg::testing::StreamLogOptions options = {}) {
  Judged out;
  sg::StreamPlan used;
  options.change = [&out, &used, change = std::move(options.change)](sg::StreamPlan& plan) {
    out.plan = plan;
    if (change) change(plan);
    used = plan;
  };
  sg::testing::StreamLogWorld world(graph.num_ranks(), std::move(options));
  const sg::RunnableGraph runnable(graph, world, {.reuse = sg::Reuse::tight});
  const sg::Program program(runnable, world);
  sg::Executor executor({.threads = 1, .waiting_lanes = static_cast<int>(program.num_waiting_lanes())});
  for (int run = 0; run < 2; ++run) executor.run(program);
  out.unordered = world.log().find_unordered(*runnable.memory(), &out.num_pairs);
  try {
    sg::verify_streams(runnable, used);
  } catch (const sg::Error& error) {
    out.unproved = error.what();
  }
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
    CHECK(found.unproved == "");
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
        const auto found = judge(graph, {.change = [&](sg::StreamPlan& broken) { drop_wait(broken, i, loop); }});
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
  const Dropped found = drop_waits(48, 3, 15);  // a share needs many, also in sanitized builds
  CHECK(4 * found.num_noticed > 3 * found.num_dropped);
  CHECK(found.num_dropped >= 150);
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
  CHECK(judge(graph, {.change = [](sg::StreamPlan& plan) { drop_wait(plan, 0, false); }}).unordered ==
        "rank 0 compute 'make' and rank 0 host 'look' of one run");
}

namespace {

// As in one process of a job over NCCL: it has one rank, whose parts run one after another.
sg::testing::StreamLogOptions over_nccl(std::function<void(sg::StreamPlan&)> change = {}) {
  return {.change = std::move(change), .issue_order = sg::IssueOrder::per_rank, .rank = sg::Rank{0}};
}

}  // namespace

TEST_CASE("where a rank issues its parts in order, a part waits for the part before it on another lane",
          "[engine][streams][device]") {
  const sg::Rank mine{0};
  sg::Graph graph(2, mine);
  const auto sum = [&](const char* name, sg::LaneKind lane) {
    graph.add({.name        = name,
               .lane        = graph.lane(mine, lane),
               .accumulates = graph.buffer({.name       = name,
                                            .rank       = mine,
                                            .size_bytes = 8,
                                            .type       = sg::DType::f32,
                                            .lifetime   = sg::Lifetime::persistent}),
               .part        = sg::PartSpec{.group   = graph.group({.name = name, .ranks = {mine, sg::Rank{1}}}),
                                           .op      = sg::PartOp::all_reduce,
                                           .message = name}});
  };
  sum("first", sg::LaneKind::reduce);
  sum("second", sg::LaneKind::tp);
  CHECK(judge(graph, {.rank = mine}).plan.waits.empty());
  const Judged good = judge(graph, over_nccl());
  CHECK(good.plan.waits == std::vector<std::uint32_t>{0});
  CHECK(good.unordered == "");
  CHECK(good.unproved == "");
  const Judged bad = judge(graph, over_nccl([](sg::StreamPlan& plan) { drop_wait(plan, 0, false); }));
  CHECK(bad.unordered == "rank 0 reduce 'first' and rank 0 tp 'second' of one run, which are issued in this order");
  CHECK_THAT(bad.unproved, Catch::Matchers::ContainsSubstring("rank 0 tp 'second' on stream 'rank 0 tp' may run before "
                                                              "rank 0 reduce 'first' on stream 'rank 0 reduce'"));
}

TEST_CASE("each wait between parts of a rank is needed for its issue order, and the proof of streams finds it missing",
          "[engine][streams][device]") {
  int num_dropped = 0, num_only_issued = 0;
  for (int seed = 1; seed <= sg::testing::cases(60); ++seed) {
    CAPTURE(seed);
    const sg::Graph graph = slice(draw_graph(seed, 3, 0), sg::Rank{0});
    const Judged whole    = judge(graph, over_nccl());
    CHECK(whole.unordered == "");
    CHECK(whole.unproved == "");
    const sg::StreamPlan& plan = whole.plan;
    for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
      for (std::uint32_t wait = plan.wait_begin[node]; wait < plan.wait_begin[node + 1]; ++wait) {
        if (!graph.has_part({node}) || !graph.has_part({plan.waits[wait]})) continue;
        const Judged found = judge(graph, over_nccl([&](sg::StreamPlan& broken) { drop_wait(broken, wait, false); }));
        CAPTURE(graph.describe(sg::Node{plan.waits[wait]}), graph.describe(sg::Node{node}));
        CHECK(found.unordered != "");
        CHECK(found.unproved != "");
        ++num_dropped;
        num_only_issued += found.unordered.ends_with("issued in this order");
      }
    }
  }
  CHECK(num_dropped >= sg::testing::at_least(60));
  CHECK(num_only_issued >= sg::testing::at_least(20));
}
