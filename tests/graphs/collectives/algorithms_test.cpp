#include "graphs/collectives/algorithms.hpp"
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/draw/dot.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/executor.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/conformance/one_collective.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using sg::Algorithm;
using sg::PartOp;
using sg::testing::one_collective;
using sg::testing::OneCollective;
using sg::testing::OneCollectiveOptions;

namespace {

// The collectives that can be expanded.
constexpr PartOp collectives[] = {PartOp::all_reduce,     PartOp::reduce,     PartOp::all_gather,
                                  PartOp::reduce_scatter, PartOp::broadcast,  PartOp::scatter,
                                  PartOp::gather,         PartOp::all_to_all, PartOp::barrier};

constexpr Algorithm expansions[] = {Algorithm::ring, Algorithm::tree, Algorithm::hierarchical};

std::vector<std::byte> run(const OneCollective& made, const sg::Graph& graph, sg::Executor& executor, bool planned) {
  sg::LoopbackWorld world(graph.num_ranks());
  const sg::Program program =
      planned ? sg::Program(sg::RunnableGraph(graph, sg::plan_memory(graph)), world) : sg::Program(graph, world);
  made.fill(program.memory());
  executor.run(program);
  return made.contents(program.memory());
}

// Expands a collective by every algorithm. Each graph must verify and, planned or not, give the result of the direct
// collective.
void check_equal(const OneCollectiveOptions& options, int ranks_per_node, sg::Executor& executor) {
  CAPTURE(sg::to_string(options.op), options.ranks, options.elements, options.type, sg::to_string(options.reduction),
          options.root, options.in_place, options.uneven, ranks_per_node);
  const auto made = one_collective(options);
  sg::verify(made.graph);
  const auto expected = run(made, made.graph, executor, false);
  for (const Algorithm algorithm : expansions) {
    CAPTURE(algorithm);
    const sg::Graph graph =
        sg::expand_collectives(made.graph, {.algorithm = algorithm, .ranks_per_node = ranks_per_node});
    const bool expands =
        sg::form_of(made.graph, {0}, {.algorithm = algorithm, .ranks_per_node = ranks_per_node}) != Algorithm::direct;
    CHECK(expands != (graph == made.graph));
    const auto findings = sg::find_flaws(graph);
    if (!findings.empty()) FAIL(findings.front().message);
    CHECK(run(made, graph, executor, false) == expected);
    CHECK(run(made, graph, executor, true) == expected);
  }
}

}  // namespace

TEST_CASE("every expansion of every collective gives the result of the direct one", "[graphs][algorithms]") {
  sg::Executor executor({.threads = 2});
  for (const PartOp op : collectives) {
    for (const int ranks : {2, 3, 4, 6, 8}) {
      for (const bool in_place : {false, true}) {
        const int per_node = ranks % 3 == 0 ? 3 : 2;
        check_equal({.op = op, .ranks = ranks, .elements = 101, .root = ranks - 1, .in_place = in_place}, per_node,
                    executor);
      }
    }
  }
}

TEST_CASE("expansions agree for every type and reduction whose results are exact", "[graphs][algorithms]") {
  sg::Executor executor({.threads = 2});
  for (const sg::DType type : {sg::DType::u8, sg::DType::i32, sg::DType::i64, sg::DType::f16, sg::DType::bf16,
                               sg::DType::f32, sg::DType::f64}) {
    for (const sg::Reduction reduction :
         {sg::Reduction::sum, sg::Reduction::average, sg::Reduction::min, sg::Reduction::max, sg::Reduction::product}) {
      for (const PartOp op : {PartOp::all_reduce, PartOp::reduce, PartOp::reduce_scatter}) {
        check_equal({.op = op, .ranks = 4, .elements = 37, .type = type, .reduction = reduction, .root = 2}, 2,
                    executor);
      }
    }
  }
}

TEST_CASE("expansions handle uneven and empty shards, fewer elements than members, and subsets of ranks",
          "[graphs][algorithms]") {
  sg::Executor executor({.threads = 2});
  for (const bool in_place : {false, true}) {
    for (const PartOp op : {PartOp::all_gather, PartOp::reduce_scatter})
      check_equal({.op = op, .ranks = 6, .elements = 60, .in_place = in_place, .uneven = true}, 3, executor);
    for (const PartOp op : collectives)
      check_equal({.op = op, .ranks = 8, .elements = 3, .root = 5, .in_place = in_place}, 4, executor);
    for (const PartOp op : collectives) {
      check_equal({.op = op, .ranks = 9, .members = {7, 6, 1, 0}, .elements = 50, .root = 1, .in_place = in_place}, 2,
                  executor);
    }
    const std::int64_t many = 200'000 / sg::testing::scale();
    check_equal({.op = PartOp::broadcast, .ranks = 5, .elements = many, .root = 3, .in_place = in_place}, 5, executor);
    check_equal({.op = PartOp::reduce, .ranks = 5, .elements = many, .root = 3, .in_place = in_place}, 5, executor);
  }
}

TEST_CASE("several collectives on one lane and group are expanded in order", "[graphs][algorithms]") {
  sg::Executor executor({.threads = 2});
  for (const PartOp op : {PartOp::all_reduce, PartOp::broadcast, PartOp::all_to_all})
    check_equal({.op = op, .ranks = 4, .elements = 40, .in_place = true, .repeats = 3}, 2, executor);
}

TEST_CASE("expanding and slicing commute", "[graphs][algorithms]") {
  for (const PartOp op : {PartOp::all_reduce, PartOp::reduce, PartOp::all_gather, PartOp::reduce_scatter,
                          PartOp::broadcast, PartOp::barrier}) {
    const auto made = one_collective({.op = op, .ranks = 6, .elements = 60, .root = 1, .repeats = 2});
    for (const Algorithm algorithm : expansions) {
      CAPTURE(sg::to_string(op), algorithm);
      const sg::ExpandOptions options{.algorithm = algorithm, .ranks_per_node = 3};
      const auto whole = sg::expand_collectives(made.graph, options);
      for (int rank = 0; rank < 6; ++rank)
        CHECK(sg::slice(whole, sg::Rank{rank}) ==
              sg::expand_collectives(sg::slice(made.graph, sg::Rank{rank}), options));
    }
  }
  const auto gathered = one_collective({.op = PartOp::gather});
  CHECK_THROWS_WITH(sg::expand_collectives(sg::slice(gathered.graph, sg::Rank{1}), {}),
                    ContainsSubstring("expand the whole graph, then slice it"));
}

TEST_CASE("a collective that an algorithm cannot expand is left unchanged", "[graphs][algorithms]") {
  const auto alone = one_collective({.ranks = 1});
  CHECK(sg::expand_collectives(alone.graph, {}) == alone.graph);
  CHECK(sg::expand_collectives(one_collective({}).graph, {.algorithm = Algorithm::direct}) == one_collective({}).graph);
  sg::Graph uneven(2);
  const auto pair                = uneven.group({.name = "g", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  const std::int64_t sizes[2][2] = {{4, 8}, {12, 4}};  // from, to
  for (const int rank : {0, 1}) {
    const auto in  = uneven.buffer({.rank = sg::Rank{rank}, .size_bytes = 16, .lifetime = sg::Lifetime::persistent});
    const auto out = uneven.buffer({.rank = sg::Rank{rank}, .size_bytes = 16, .lifetime = sg::Lifetime::persistent});
    uneven.add({.name   = "exchange",
                .lane   = uneven.lane(sg::Rank{rank}, sg::LaneKind::tp),
                .reads  = {in.range(0, sizes[rank][0]), in.range(sizes[rank][0], sizes[rank][1])},
                .writes = {out.range(0, sizes[0][rank]), out.range(sizes[0][rank], sizes[1][rank])},
                .part   = sg::PartSpec{.group = pair, .op = PartOp::all_to_all, .type = sg::DType::u8}});
  }
  sg::verify(uneven);
  CHECK(sg::form_of(uneven, {0}, {}) == Algorithm::direct);
  CHECK(sg::expand_collectives(uneven, {}) == uneven);
  const auto lopsided = one_collective({.ranks = 5});
  CHECK(sg::form_of(lopsided.graph, {0}, {.algorithm = Algorithm::hierarchical, .ranks_per_node = 2}) ==
        Algorithm::direct);
  CHECK(sg::form_of(lopsided.graph, {0}, {.algorithm = Algorithm::tree}) != Algorithm::direct);
}

TEST_CASE("invalid options and unsupported graphs are refused by name", "[graphs][algorithms][refuses]") {
  const auto made = one_collective({});
  CHECK_THROWS_WITH(sg::expand_collectives(made.graph, {.ranks_per_node = 0}), ContainsSubstring("ranks_per_node = 0"));
  CHECK_THROWS_WITH(sg::expand_collectives(made.graph, {.algorithm = Algorithm::adaptive}),
                    ContainsSubstring("set .machine"));
  const sg::Machine small(2);
  CHECK_THROWS_WITH(sg::expand_collectives(made.graph, {.algorithm = Algorithm::adaptive, .machine = &small}),
                    ContainsSubstring("machine has 2 ranks, but the graph has 4"));
  CHECK_THROWS_WITH(sg::parse_algorithm("rign"), ContainsSubstring("direct, ring, tree, hierarchical, adaptive"));
  CHECK(sg::parse_algorithm("tree") == Algorithm::tree);

  sg::Graph graph(2);
  const auto group = graph.group({.name = "g", .ranks = {sg::Rank{0}, sg::Rank{1}}});
  for (const int rank : {0, 1}) {
    for (const auto lane : {sg::LaneKind::tp, sg::LaneKind::reduce})
      graph.add(
          {.name = "b", .lane = graph.lane(sg::Rank{rank}, lane), .part = sg::PartSpec{.group = group, .issue = 0}});
  }
  CHECK_THROWS_WITH(sg::expand_collectives(graph, {}), ContainsSubstring("is issued together with"));
}

TEST_CASE("a collective whose members disagree is not expanded", "[graphs][algorithms][refuses]") {
  for (const bool sizes : {true, false}) {
    sg::Graph graph(2);
    const auto group = graph.group({.name = "g", .ranks = {sg::Rank{0}, sg::Rank{1}}});
    for (const int rank : {0, 1}) {
      const auto buffer = graph.buffer({.rank       = sg::Rank{rank},
                                        .size_bytes = sizes && rank == 1 ? 128 : 64,
                                        .type       = sg::DType::f32,
                                        .lifetime   = sg::Lifetime::persistent});
      graph.add({.name        = "sum",
                 .lane        = graph.lane(sg::Rank{rank}, sg::LaneKind::reduce),
                 .accumulates = {buffer},
                 .part        = sg::PartSpec{.group     = group,
                                             .op        = PartOp::all_reduce,
                                             .reduction = !sizes && rank == 1 ? sg::Reduction::max : sg::Reduction::sum}});
    }
    CHECK_FALSE(sg::find_flaws(graph).empty());
    for (const Algorithm algorithm : expansions)
      CHECK_THROWS_WITH(sg::expand_collectives(graph, {.algorithm = algorithm}),
                        ContainsSubstring("(verify prints the details)"));
  }
  sg::Graph plain;
  plain.add({.name = "n", .rank = sg::Rank{0}});
  CHECK_THROWS_WITH(sg::form_of(plain, {0}, {}), ContainsSubstring("is not a part"));
}

TEST_CASE("averages whose partial sums could overflow are not expanded", "[graphs][algorithms]") {
  for (const sg::DType type : {sg::DType::u8, sg::DType::i32, sg::DType::f16}) {
    const auto made = one_collective({.type = type, .reduction = sg::Reduction::average});
    CHECK(sg::form_of(made.graph, {0}, {}) == Algorithm::direct);
    CHECK(sg::expand_collectives(made.graph, {}) == made.graph);
  }
  CHECK(sg::form_of(one_collective({.reduction = sg::Reduction::average}).graph, {0}, {}) != Algorithm::direct);
}

TEST_CASE("tokens of a collective order all nodes of its expansion", "[graphs][algorithms]") {
  auto made = one_collective({.ranks = 3});
  sg::Graph graph(3);
  std::vector<sg::Buffer> values, tokens;
  std::vector<sg::Rank> ranks{sg::Rank{0}, sg::Rank{1}, sg::Rank{2}};
  const auto group = graph.group({.name = "g", .ranks = ranks});
  std::vector<sg::Node> before, after;
  for (const sg::Rank rank : ranks) {
    values.push_back(
        graph.buffer({.rank = rank, .size_bytes = 48, .type = sg::DType::f32, .lifetime = sg::Lifetime::persistent}));
    tokens.push_back(graph.token(rank, "order"));
    before.push_back(
        graph.add({.name = "before", .lane = graph.lane(rank, sg::LaneKind::host), .writes = {tokens.back()}}));
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    graph.add({.name        = "sum",
               .lane        = graph.lane(ranks[i], sg::LaneKind::reduce),
               .writes      = {tokens[i]},
               .accumulates = {values[i]},
               .part        = sg::PartSpec{.group = group, .op = PartOp::all_reduce}});
    after.push_back(
        graph.add({.name = "after", .lane = graph.lane(ranks[i], sg::LaneKind::compute), .reads = {tokens[i]}}));
  }
  for (const Algorithm algorithm : expansions) {
    const auto expanded = sg::expand_collectives(graph, {.algorithm = algorithm});
    std::vector<sg::Node> starts, ends;
    for (std::uint32_t i = 0; i < expanded.num_nodes(); ++i) {
      if (expanded.name({i}) == "before") starts.push_back({i});
      if (expanded.name({i}) == "after") ends.push_back({i});
    }
    for (std::uint32_t i = 0; i < expanded.num_nodes(); ++i) {
      if (expanded.name({i}) == "before" || expanded.name({i}) == "after") continue;
      const auto rank = static_cast<std::size_t>(sg::index(expanded.rank({i})));
      CHECK(sg::reaches(expanded, starts[rank], {i}));
      CHECK(sg::reaches(expanded, {i}, ends[rank]));
    }
  }
}

TEST_CASE("every expansion of every collective of 64 ranks is verified, planned, simulated, drawn and run on 2 threads",
          "[graphs][algorithms]") {
  const int ranks = sg::testing::sanitized() ? 16 : 64;
  sg::Executor executor({.threads = 2});
  const sg::Machine machine = sg::two_level_machine({.ranks              = ranks,
                                                     .ranks_per_node     = 8,
                                                     .inside             = {1e-6, 100e9},
                                                     .between            = {5e-6, 25e9},
                                                     .message_overhead_s = 1e-7});
  for (const PartOp op : collectives) {
    const auto made     = one_collective({.op = op, .ranks = ranks, .elements = 640, .root = 11});
    const auto expected = run(made, made.graph, executor, false);
    for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree, Algorithm::hierarchical, Algorithm::adaptive}) {
      CAPTURE(sg::to_string(op), algorithm);
      const auto graph = sg::expand_collectives(made.graph, {.algorithm = algorithm, .machine = &machine});
      const auto plan  = sg::plan_memory(graph, {.machine = &machine});
      CHECK(sg::find_flaws({graph, plan}).empty());
      CHECK(plan.makespan_s > 0);
      std::ostringstream drawing;
      sg::write_dot(graph, drawing, {.detail = sg::Detail::stage});
      const bool circles = op == PartOp::all_reduce || op == PartOp::all_gather || op == PartOp::reduce_scatter ||
                           op == PartOp::all_to_all;
      if (algorithm == Algorithm::ring && circles) CHECK_THAT(drawing.str(), ContainsSubstring("permute"));
      if (algorithm == Algorithm::tree && op != PartOp::all_to_all)
        CHECK_THAT(drawing.str(),
                   ContainsSubstring("send") && ContainsSubstring("recv") && !ContainsSubstring("permute"));
      sg::LoopbackWorld world(ranks);
      const sg::Program program(sg::RunnableGraph(graph, plan), world);
      made.fill(program.memory());
      executor.run(program);
      CHECK(made.contents(program.memory()) == expected);
    }
  }
}

TEST_CASE("an expansion that would be too large is refused before it is made", "[graphs][collectives]") {
  for (const PartOp op : {PartOp::all_reduce, PartOp::all_gather, PartOp::reduce_scatter, PartOp::all_to_all}) {
    CAPTURE(sg::to_string(op));
    const auto made     = one_collective({.op = op, .ranks = 32, .elements = 4096});
    const auto expanded = [&](Algorithm algorithm, double most_nodes, const sg::Machine* machine = nullptr) {
      return sg::expand_collectives(made.graph, {.algorithm = algorithm, .machine = machine, .most_nodes = most_nodes})
          .num_nodes();
    };
    const double nodes = expanded(Algorithm::ring, 1e9);
    CHECK(expanded(Algorithm::ring, 1.2 * nodes) == nodes);
    CHECK_THROWS_WITH(expanded(Algorithm::ring, 0.8 * nodes),
                      ContainsSubstring("expand: the algorithm ring makes about ") &&
                          ContainsSubstring("; the algorithm direct or tree, or smaller groups)"));
    // A candidate that is too large is not chosen.
    const sg::Machine machine = sg::two_level_machine({.ranks = 32});
    CHECK(expanded(Algorithm::adaptive, 0.8 * nodes, &machine) < 0.8 * nodes);
  }
}
