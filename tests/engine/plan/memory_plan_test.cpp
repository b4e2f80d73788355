#include "engine/plan/memory_plan.hpp"
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <fstream>
#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/graphs/computing_graph.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/graphs/rank_sets.hpp"
#include "tests/support/scale.hpp"
#include "tools/examples/sharded_step.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::testing::computing_graph;
using sg::testing::ComputingGraph;

namespace {

sg::Buffer step_buffer(sg::Graph& graph, std::string name, std::int64_t size_bytes = 64, sg::Rank rank = {}) {
  return graph.buffer({.name = std::move(name), .rank = rank, .size_bytes = size_bytes});
}

// Two independent lanes, each with a buffer. The second lane starts with other work.
struct TwoLanes {
  sg::Graph graph;
  sg::Buffer a = step_buffer(graph, "a"), b = step_buffer(graph, "b");
  sg::Lane compute = graph.lane(sg::Rank{0}, sg::LaneKind::compute), host = graph.lane(sg::Rank{0}, sg::LaneKind::host);
  sg::Node make_a = graph.add({.name = "make a", .lane = compute, .writes = {a}});
  sg::Node use_a  = graph.add({.name = "use a", .lane = compute, .reads = {a}});
  sg::Node wait   = graph.add({.name = "wait", .lane = host});
  sg::Node more   = graph.add({.name = "wait more", .lane = host});
  sg::Node make_b = graph.add({.name = "make b", .lane = host, .writes = {b}});
  sg::Node use_b  = graph.add({.name = "use b", .lane = host, .reads = {b}});
};

// A pipeline stage on the compute lane: forward and backward of `layers` for each of `microbatches`, with `depth`
// forwards ahead of the backwards. Gradients are reduced on another lane meanwhile.
sg::Graph step_shaped(int layers, int microbatches, int depth) {
  sg::Graph graph;
  const sg::Lane compute = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  const sg::Lane reduce  = graph.lane(sg::Rank{0}, sg::LaneKind::reduce);
  const auto weights     = graph.buffer({.name = "weights", .size_bytes = 4096, .lifetime = sg::Lifetime::persistent});
  std::vector<std::vector<sg::Buffer>> kept(static_cast<std::size_t>(microbatches));
  const auto forward = [&](int mb) {
    auto& mine   = kept[static_cast<std::size_t>(mb)];
    sg::Buffer x = step_buffer(graph, sg::str("x", mb), 40'000);
    graph.add({.name = "load", .lane = compute, .writes = {x}});
    for (int layer = 0; layer < layers; ++layer) {
      const auto hidden = step_buffer(graph, sg::str("h", mb, ".", layer), 160'000 + 64 * layer);
      const auto scores = step_buffer(graph, sg::str("s", mb, ".", layer), 90'112);
      const auto y      = step_buffer(graph, sg::str("y", mb, ".", layer), 40'000);
      graph.add({.name = "up", .lane = compute, .reads = {x, weights}, .writes = {hidden}});
      graph.add({.name = "mix", .lane = compute, .reads = {hidden}, .writes = {scores}});
      graph.add({.name = "down", .lane = compute, .reads = {scores, hidden}, .writes = {y}});
      mine.push_back(x);
      mine.push_back(hidden);
      x = y;
    }
    mine.push_back(x);
  };
  const auto backward = [&](int mb) {
    auto& mine   = kept[static_cast<std::size_t>(mb)];
    sg::Buffer g = step_buffer(graph, sg::str("g", mb), 40'000);
    graph.add({.name = "loss", .lane = compute, .reads = {mine.back()}, .writes = {g}});
    for (int layer = layers - 1; layer >= 0; --layer) {
      const auto up   = step_buffer(graph, sg::str("gh", mb, ".", layer), 160'000);
      const auto down = step_buffer(graph, sg::str("gx", mb, ".", layer), 40'000);
      const auto grad = step_buffer(graph, sg::str("gw", mb, ".", layer), 65'600);
      graph.add({.name   = "d up",
                 .lane   = compute,
                 .reads  = {g, mine[static_cast<std::size_t>(2 * layer + 1)]},
                 .writes = {up}});
      graph.add({.name   = "d down",
                 .lane   = compute,
                 .reads  = {up, mine[static_cast<std::size_t>(2 * layer)]},
                 .writes = {down, grad}});
      graph.add({.name = "reduce", .lane = reduce, .reads = {grad}, .accumulates = {weights.range(64 * layer, 64)}});
      g = down;
    }
  };
  for (int i = 0; i < microbatches + depth; ++i) {
    if (i < microbatches) forward(i);
    if (i >= depth) backward(i - depth);
  }
  return graph;
}

// The largest ratio of an arena to its lower bound.
double worst_ratio(const sg::MemoryPlan& plan) {
  double worst = 1;
  for (const sg::ArenaPlan& arena : plan.arenas)
    worst = std::max(worst, static_cast<double>(arena.size_bytes) / static_cast<double>(arena.lower_bound));
  return worst;
}

sg::Edges without(const sg::Edges& edges, const sg::ReuseEdge& edge) {
  sg::Edges out = edges;
  auto& begin   = edge.loop ? out.loop_begin : out.pred_begin;
  auto& preds   = edge.loop ? out.loop_preds : out.preds;
  const auto at =
      std::find(preds.begin() + begin[edge.after.id], preds.begin() + begin[edge.after.id + 1], edge.before.id);
  REQUIRE(at != preds.begin() + begin[edge.after.id + 1]);
  preds.erase(at);
  for (std::size_t i = edge.after.id + 1; i < begin.size(); ++i) --begin[i];
  return out;
}

std::vector<std::int64_t> results(const ComputingGraph& graph, const sg::Memory& memory) {
  std::vector<std::int64_t> out;
  for (const sg::Buffer buffer : graph.results) {
    for (const std::int64_t word : memory.span<std::int64_t>(buffer)) out.push_back(word);
  }
  return out;
}

}  // namespace

TEST_CASE("a chain of buffers shares the bytes of two", "[engine][plan]") {
  sg::Graph graph;
  const sg::Lane lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  sg::Buffer before   = step_buffer(graph, "0");
  graph.add({.name = "0", .lane = lane, .writes = {before}});
  for (int i = 1; i < 10; ++i) {
    const sg::Buffer next = step_buffer(graph, sg::str(i));
    graph.add({.name = sg::str(i), .lane = lane, .reads = {before}, .writes = {next}});
    before = next;
  }
  for (const sg::Reuse reuse : {sg::Reuse::free, sg::Reuse::tight}) {
    const auto plan = sg::plan_memory(graph, {.reuse = reuse});
    CHECK(plan.arena(sg::Rank{0}).size_bytes == 128);
    CHECK(plan.arena(sg::Rank{0}).lower_bound == 128);
    CHECK(plan.reuse_edges.empty());
    CHECK(plan.edges == graph.edges());
    sg::verify({graph, plan});
  }
}

TEST_CASE("tight reuse lets independent lanes share bytes at the cost of an edge, free reuse does not",
          "[engine][plan]") {
  const TwoLanes lanes;
  const auto free  = sg::plan_memory(lanes.graph, {.reuse = sg::Reuse::free});
  const auto tight = sg::plan_memory(lanes.graph, {.reuse = sg::Reuse::tight});
  CHECK(free.arena(sg::Rank{0}).size_bytes == 128);
  CHECK(free.reuse_edges.empty());
  CHECK(tight.arena(sg::Rank{0}).size_bytes == 64);
  for (const auto* plan : {&free, &tight}) {
    CHECK(plan->arena(sg::Rank{0}).free_bytes == 128);
    CHECK(plan->arena(sg::Rank{0}).tight_bytes == 64);
    CHECK(plan->makespan_s == 4);
    CHECK(plan->makespan_with_reuse_s == 4);  // the second lane had something else to do first
    sg::verify({lanes.graph, *plan});
  }
  REQUIRE(tight.num_reuse_edges() == 1);
  CHECK(tight.reuse_edges[0].before == lanes.use_a);
  CHECK(tight.reuse_edges[0].after == lanes.make_b);
  CHECK(tight.reuse_edges[0].old_tenant == lanes.a);
  CHECK(tight.reuse_edges[0].new_tenant == lanes.b);
  std::ostringstream text;
  text << tight;
  CHECK_THAT(text.str(), ContainsSubstring("reuse tight") &&
                             ContainsSubstring("1 reuse edge, and 1 into the next run") && ContainsSubstring("+0.00%"));
}

TEST_CASE("the cost of reuse edges is simulated", "[engine][plan]") {
  TwoLanes lanes;
  sg::Machine machine(1);  // using `a` takes so long that `b` would be ready meanwhile if it had its own bytes
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 1});
  sg::Graph graph;
  const auto a = step_buffer(graph, "a"), b = step_buffer(graph, "b");
  const auto add = [&](const char* name, sg::LaneKind lane, sg::AccessList reads, sg::AccessList writes,
                       double seconds) {
    graph.add({.name   = name,
               .lane   = graph.lane(sg::Rank{0}, lane),
               .reads  = reads,
               .writes = writes,
               .cost   = {.flops = seconds}});
  };
  add("make a", sg::LaneKind::compute, {}, {a}, 1);
  add("use a", sg::LaneKind::compute, {a}, {}, 5);
  add("wait", sg::LaneKind::host, {}, {}, 2);
  add("make b", sg::LaneKind::host, {}, {b}, 3);
  const auto plan = sg::plan_memory(graph, {.machine = &machine});
  CHECK(plan.arena(sg::Rank{0}).size_bytes == 64);
  CHECK(plan.makespan_s == 6);
  CHECK(plan.makespan_with_reuse_s == 9);
}

TEST_CASE("a dropped reuse edge is reported, naming both nodes and both buffers", "[engine][plan]") {
  const TwoLanes lanes;
  auto plan       = sg::plan_memory(lanes.graph);
  const auto kept = plan;
  for (const sg::ReuseEdge& edge : kept.reuse_edges) {
    plan.edges          = without(kept.edges, edge);
    const auto findings = sg::find_flaws({lanes.graph, plan});
    REQUIRE(findings.size() == 1);
    CHECK(findings[0].flaw == (edge.loop ? sg::Flaw::loop_race : sg::Flaw::race));
    CHECK_THAT(findings[0].message, ContainsSubstring(lanes.graph.describe(edge.before)) &&
                                        ContainsSubstring(lanes.graph.describe(edge.after)) &&
                                        ContainsSubstring("buffer 'a'") && ContainsSubstring("buffer 'b'") &&
                                        ContainsSubstring("bytes [0, 64) of the arena"));
  }
  CHECK_THROWS_WITH(sg::verify({lanes.graph, plan}), ContainsSubstring("race"));
}

TEST_CASE("buffers that share bytes are also ordered across runs", "[engine][plan]") {
  // `w` follows `r`, so b may take the bytes of a. But nothing in the graph makes the next run's `a` wait for `w`.
  sg::Graph graph;
  const auto a = step_buffer(graph, "a"), b = step_buffer(graph, "b");
  const auto t       = graph.token(sg::Rank{0}, "t");
  const auto compute = graph.lane(sg::Rank{0}, sg::LaneKind::compute),
             reduce  = graph.lane(sg::Rank{0}, sg::LaneKind::reduce);
  const auto first   = graph.add({.name = "a", .lane = compute, .writes = {a}});
  graph.add({.name = "r", .lane = compute, .reads = {a}, .writes = {t}});
  const auto last = graph.add({.name = "w", .lane = reduce, .reads = {t}, .writes = {b}});
  for (const sg::Reuse reuse : {sg::Reuse::free, sg::Reuse::tight}) {
    auto plan = sg::plan_memory(graph, {.reuse = reuse});
    CHECK(plan.arena(sg::Rank{0}).size_bytes == 64);
    CHECK(plan.num_reuse_edges() == 0);
    REQUIRE(plan.reuse_edges.size() == 1);
    CHECK(plan.reuse_edges[0].loop);
    CHECK(plan.reuse_edges[0].before == last);
    CHECK(plan.reuse_edges[0].after == first);
    sg::verify({graph, plan});
    plan.edges = without(plan.edges, plan.reuse_edges[0]);
    CHECK_THROWS_WITH(sg::verify({graph, plan}), ContainsSubstring("race around the loop"));
  }
}

TEST_CASE("verify reports placements that no order can make valid", "[engine][plan]") {
  sg::Graph graph;
  const auto kept = graph.buffer({.name = "kept", .size_bytes = 64, .lifetime = sg::Lifetime::persistent});
  const auto a = step_buffer(graph, "a"), b = step_buffer(graph, "b");
  const auto lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  graph.add({.name = "make", .lane = lane, .reads = {kept}, .writes = {a}});
  graph.add({.name = "both", .lane = lane, .reads = {a}, .writes = {b}});
  const auto good = sg::plan_memory(graph);
  CHECK(good.arena(sg::Rank{0}).size_bytes == 192);
  const auto flaw = [&](sg::Buffer buffer, std::int64_t offset) {
    auto bad               = good;
    bad.offsets[buffer.id] = offset;
    const auto findings    = sg::find_flaws({graph, bad});
    REQUIRE_FALSE(findings.empty());
    return findings[0];
  };
  CHECK_THAT(flaw(b, good.offsets[a.id]).message, ContainsSubstring("and the same node uses"));
  CHECK(flaw(b, good.offsets[kept.id]).flaw == sg::Flaw::bad_place);
  CHECK_THAT(flaw(b, good.offsets[kept.id]).message, ContainsSubstring("'kept' is persistent"));
  CHECK(flaw(b, 192).flaw == sg::Flaw::bad_place);
  CHECK(flaw(b, 100).flaw == sg::Flaw::bad_place);
  CHECK(flaw(a, sg::MemoryPlan::nowhere).flaw == sg::Flaw::bad_place);
  CHECK_THROWS_WITH(sg::find_flaws({sg::Graph(), good}), ContainsSubstring("plan is for 3 buffers"));
}

TEST_CASE("tight plans stay within 5% of the lower bound on step-shaped graphs", "[engine][plan]") {
  for (const auto [layers, microbatches, depth] : {std::array{4, 8, 1}, std::array{6, 8, 4}, std::array{3, 12, 12}}) {
    CAPTURE(layers, microbatches, depth);
    const auto graph = step_shaped(layers, microbatches, depth);
    const auto plan  = sg::plan_memory(graph);
    CHECK(worst_ratio(plan) <= 1.05);
    CHECK(plan.arena(sg::Rank{0}).free_bytes >= plan.arena(sg::Rank{0}).tight_bytes);
    sg::verify({graph, plan});
    sg::verify({graph, sg::plan_memory(graph, {.reuse = sg::Reuse::free})});
  }
  const auto sharded = sg::sharded_step({.ranks = 4, .layers = 6});
  const auto plan    = sg::plan_memory(sharded.graph);
  CHECK(worst_ratio(plan) <= 1.05);
  sg::verify({sharded.graph, plan});
}

TEST_CASE("plans of random graphs verify, are tight, and need every reuse edge", "[engine][plan]") {
  for (int seed = 0; seed < sg::testing::cases(12); ++seed) {
    CAPTURE(seed);
    const auto random =
        computing_graph(static_cast<std::uint64_t>(seed), {.ranks = 1 + seed % 3, .nodes_per_rank = 150});
    for (const sg::Reuse reuse : {sg::Reuse::free, sg::Reuse::tight}) {
      const auto plan = sg::plan_memory(random.graph, {.reuse = reuse});
      CHECK(sg::find_flaws({random.graph, plan}).empty());
      for (const sg::ArenaPlan& arena : plan.arenas) {
        CHECK(arena.size_bytes == (reuse == sg::Reuse::free ? arena.free_bytes : arena.tight_bytes));
        CHECK(arena.lower_bound <= arena.tight_bytes);
        CHECK(arena.tight_bytes <= arena.free_bytes);
      }
      if (reuse == sg::Reuse::free) {
        CHECK(plan.num_reuse_edges() == 0);
        continue;
      }
      CHECK(worst_ratio(plan) <= 1.05);
      CHECK(plan.num_reuse_edges() > 0);
      auto broken = plan;
      for (std::size_t i = 0; i < plan.reuse_edges.size(); i += 7) {
        if (!random.graph.lane(plan.reuse_edges[i].before)) continue;  // the short search may keep a redundant one
        broken.edges = without(plan.edges, plan.reuse_edges[i]);
        CHECK_FALSE(sg::find_flaws({random.graph, broken}, {.max_findings = 1}).empty());
      }
    }
  }
}

TEST_CASE("graphs of every kind of part are planned, whole and slice by slice", "[engine][plan]") {
  for (int seed = 0; seed < sg::testing::cases(60); ++seed) {
    CAPTURE(seed);
    const auto graph =
        sg::testing::random_graph(static_cast<std::uint64_t>(seed), sg::testing::RandomGraphOptions::medium());
    const auto plan = sg::plan_memory(graph);
    CHECK(sg::find_flaws({graph, plan}).empty());
    CHECK(sg::find_flaws({graph, sg::plan_memory(graph, {.reuse = sg::Reuse::free})}).empty());
    for (const sg::RankSet& ranks : sg::testing::rank_sets(graph.num_ranks())) {
      CAPTURE(to_string(ranks));
      const auto alone = sg::slice(graph, ranks);
      CHECK(sg::find_flaws({alone, sg::slice(graph, plan, ranks)}).empty());
      CHECK(sg::find_flaws({alone, sg::plan_memory(alone)}).empty());
      for (const sg::Rank rank : ranks)
        CHECK(sg::slice(graph, plan, ranks).arena(rank).size_bytes == plan.arena(rank).size_bytes);
    }
  }
}

TEST_CASE("a run in planned arenas computes the same, while every dead byte is poisoned", "[engine][plan]") {
  for (int seed = 0; seed < sg::testing::cases(12); ++seed) {
    CAPTURE(seed);
    const auto random = computing_graph(static_cast<std::uint64_t>(seed), {.ranks = 1 + seed % 4});
    sg::LoopbackWorld world(random.graph.num_ranks());
    sg::testing::PoisoningWorld poisoning(world, *random.poisoner);
    sg::Executor executor({.threads = 3});
    const sg::Program apart(random.graph, world);
    executor.run(apart);
    const auto expected = results(random, apart.memory());
    for (const sg::Reuse reuse : {sg::Reuse::free, sg::Reuse::tight}) {
      const auto plan = sg::plan_memory(random.graph, {.reuse = reuse});
      const sg::Program program(sg::RunnableGraph(random.graph, plan), poisoning);
      for (int run = 0; run < 5; ++run) {
        for (const sg::Buffer result : random.results) program.memory().span<std::int64_t>(result)[0] = 0;
        program.memory().poison();
        random.poisoner->arm(random.graph, program.memory());
        executor.run(program);
        REQUIRE(results(random, program.memory()) == expected);
      }
      for (const sg::ArenaPlan& arena : plan.arenas) {
        CHECK(program.memory().arena(arena.rank).size() == static_cast<std::size_t>(arena.size_bytes));
        // Ends inside the last cache line: buffer sizes are not multiples of a line.
        CHECK(program.memory().used_bytes(arena.rank) <= arena.size_bytes);
        CHECK(program.memory().used_bytes(arena.rank) > arena.size_bytes - sg::MemoryPlan::alignment);
      }
    }
    CHECK(random.poisoner->num_poisoned() > 0);
  }
}

TEST_CASE("poisoning detects a run that ignores the reuse edges", "[engine][plan]") {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const auto random = computing_graph(seed, {.ranks = 1, .messages = false});
    sg::LoopbackWorld world(1);
    sg::Executor executor({.threads = 1});
    const sg::Program apart(random.graph, world);
    executor.run(apart);
    auto plan  = sg::plan_memory(random.graph);
    plan.edges = random.graph.edges();
    CHECK_THROWS_WITH(sg::RunnableGraph(random.graph, plan), ContainsSubstring("lack a reuse edge of the plan"));
    plan.reuse_edges.clear();  // now nothing but `verify` can tell
    CHECK_FALSE(sg::find_flaws({random.graph, plan}, {.max_findings = 1}).empty());
    const sg::Program program(sg::RunnableGraph(random.graph, plan), world);
    random.poisoner->arm(random.graph, program.memory());
    executor.run(program);
    wrong += results(random, program.memory()) != results(random, apart.memory()) ? 1 : 0;
  }
  CHECK(wrong > 0);
}

TEST_CASE("a run takes as much resident memory as its plan says", "[engine][plan]") {
  if (sg::testing::is_sanitized()) SKIP("sanitizers keep shadow memory");
  const auto resident = [] {
    std::ifstream statm("/proc/self/statm");
    std::int64_t size = 0, pages = 0;
    statm >> size >> pages;
    return pages * 4096;
  };
  sg::Graph graph;
  constexpr std::int64_t size = 16 << 20;
  const auto lane             = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  sg::Buffer before           = step_buffer(graph, "0", size);
  const auto fill             = [](const sg::Context& context) {
    for (std::byte& byte : context.write()) byte = std::byte{1};
  };
  graph.add({.name = "0", .lane = lane, .writes = {before}}, fill);
  for (int i = 1; i < 8; ++i) {
    const auto next = step_buffer(graph, sg::str(i), size);
    graph.add({.name = sg::str(i), .lane = lane, .reads = {before}, .writes = {next}}, fill);
    before = next;
  }
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const auto plan          = sg::plan_memory(graph);
  const std::int64_t start = resident();
  const sg::Program program(sg::RunnableGraph(graph, plan), world);
  executor.run(program);
  const std::int64_t grown = resident() - start;
  CHECK(plan.arena(sg::Rank{0}).size_bytes == 2 * size);
  CHECK(grown >= 2 * size);
  CHECK(grown <= 2 * size + (4 << 20));
}

TEST_CASE("memory made for one plan refuses other plans", "[engine][plan]") {
  const TwoLanes lanes;
  sg::LoopbackWorld world(1);
  const auto tight = sg::plan_memory(lanes.graph), free = sg::plan_memory(lanes.graph, {.reuse = sg::Reuse::free});
  const auto memory = std::make_shared<sg::Memory>(lanes.graph, tight);
  CHECK_THROWS_WITH(sg::Program(lanes.graph, world, memory), ContainsSubstring("give the program the same plan"));
  CHECK_THROWS_WITH(sg::Program(sg::RunnableGraph(lanes.graph, free), world, memory),
                    ContainsSubstring("make the memory from the plan that runs"));
  CHECK_NOTHROW(sg::Program(sg::RunnableGraph(lanes.graph, tight), world, memory));
  CHECK_THROWS_WITH(sg::RunnableGraph(sg::Graph(), tight), ContainsSubstring("plan is for 2 buffers"));
  CHECK_THROWS_WITH(memory->bytes(lanes.a), ContainsSubstring("declare it persistent"));

  // The same number of nodes and buffers, but a different graph: other edges, or other ranks of buffers.
  sg::Graph ordered;
  const auto x = step_buffer(ordered, "x"), y = step_buffer(ordered, "y");
  for (const sg::Buffer buffer : {x, y, x, y, x, y})
    ordered.add({.name = "n", .accumulates = {buffer}, .rank = sg::Rank{0}});
  CHECK_THROWS_WITH(sg::RunnableGraph(ordered, tight), ContainsSubstring("the plan is for another graph"));
  sg::Graph apart(2);
  const auto here = step_buffer(apart, "here"), there = step_buffer(apart, "there", 64, sg::Rank{1});
  for (int i = 0; i < 6; ++i) apart.add({.name = "n", .writes = {i % 2 == 0 ? here : there}});
  CHECK_THROWS_WITH(memory->check_fits(apart, &tight), ContainsSubstring("was allocated elsewhere"));

  auto circle = tight;  // use b -> make a, beside use a -> make b
  circle.edges.preds.insert(circle.edges.preds.begin(), lanes.use_b.id);
  for (std::size_t i = 1; i < circle.edges.pred_begin.size(); ++i) ++circle.edges.pred_begin[i];
  CHECK_THROWS_WITH(sg::Program(sg::RunnableGraph(lanes.graph, circle), world),
                    ContainsSubstring("wait for each other in a cycle"));
}

TEST_CASE("buffers that no node touches, tokens and empty accesses take no bytes", "[engine][plan]") {
  sg::Graph graph;
  const auto idle = step_buffer(graph, "idle"), empty = step_buffer(graph, "empty"), used = step_buffer(graph, "used");
  const auto token = graph.token(sg::Rank{0}, "t");
  graph.add({.name = "x", .reads = {token, empty.range(0, 0)}, .writes = {used}}, [] {});
  const auto plan = sg::plan_memory(graph);
  CHECK(plan.arena(sg::Rank{0}).size_bytes == 64);
  CHECK(plan.offsets[idle.id] == sg::MemoryPlan::nowhere);
  CHECK(plan.offsets[token.id] == sg::MemoryPlan::nowhere);
  sg::verify({graph, plan});
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  executor.run(sg::Program(sg::RunnableGraph(graph, plan), world));
  CHECK(plan.arena(sg::Rank{0}, sg::Space::pinned).size_bytes == 0);
}

TEST_CASE("a graph whose parts wait in a cycle is not planned", "[engine][plan]") {
  sg::Graph graph(2);
  const auto group = graph.group({.name = "g", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  const auto other = graph.group({.name = "h", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  for (const int rank : {0, 1}) {
    for (const auto in : {rank == 0 ? group : other, rank == 0 ? other : group}) {
      graph.add(
          {.name = "barrier", .lane = graph.lane(sg::Rank{rank}, sg::LaneKind::tp), .part = sg::PartSpec{.group = in}});
    }
  }
  CHECK_THROWS_WITH(sg::plan_memory(graph), ContainsSubstring("wait for each other"));
}

TEST_CASE("poisoning spares persistent buffers, planned or not", "[engine][plan]") {
  sg::Graph graph;
  const auto scratch = step_buffer(graph, "scratch");
  const auto kept    = graph.buffer({.name = "kept", .size_bytes = 64, .lifetime = sg::Lifetime::persistent});
  graph.add({.name = "n", .reads = {kept}, .writes = {scratch}});
  for (sg::Memory& memory : std::array{sg::Memory(graph), sg::Memory(graph, sg::plan_memory(graph))}) {
    memory.bytes(kept)[5] = std::byte{7};
    memory.poison();
    CHECK(memory.bytes(kept)[5] == std::byte{7});
    CHECK(memory.used_bytes(sg::Rank{0}) == 64);
  }
}

TEST_CASE("plans of thousands of buffers are tight too, and free costs nothing where a lane orders everything",
          "[engine][plan]") {
  sg::testing::Random random(11);
  sg::Graph graph;
  const auto lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  std::vector<std::pair<std::uint64_t, sg::Buffer>> alive;  // end of its life
  for (std::uint64_t i = 0; i < 6000; ++i) {
    sg::NodeSpec node{.name = "n", .lane = lane};
    const auto buffer = step_buffer(graph, "b", random.between(1, 1000) * 64);
    node.writes       = buffer;
    alive.emplace_back(i + 1 + random.below(40), buffer);
    for (const auto& [until, read] : alive) {
      if (until == i) node.reads.push_back(read);
    }
    std::erase_if(alive, [&](const auto& entry) { return entry.first <= i; });
    graph.add(node);
  }
  const auto plan = sg::plan_memory(graph);
  CHECK(worst_ratio(plan) <= 1.05);
  CHECK(plan.arena(sg::Rank{0}).free_bytes == plan.arena(sg::Rank{0}).tight_bytes);
  CHECK(plan.num_reuse_edges() == 0);
  CHECK(sg::find_flaws({graph, plan}).empty());
}
