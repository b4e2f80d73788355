// The oracle on cases small enough to check by hand: the reference for the verifier must itself be right.
#include <algorithm>
#include <array>
#include <catch2/catch_test_macros.hpp>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/oracle/mutation.hpp"
#include "tests/support/oracle/oracle.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using namespace stepgraph::testing;

namespace {

// Edges given by hand: `edges` inside one run, `loop` from one run to the next, as {from, to}.
struct Edge {
  std::uint32_t from, to;
};
sg::Edges edges_of(const sg::Graph& graph, const std::vector<Edge>& edges, const std::vector<Edge>& loop = {}) {
  sg::Edges result;
  const auto pack = [&](const std::vector<Edge>& list, auto& begin, auto& preds) {
    begin = {0};
    for (std::uint32_t to = 0; to < graph.num_nodes(); ++to) {
      for (std::uint32_t from = 0; from < graph.num_nodes(); ++from) {
        for (const Edge& edge : list) {
          if (edge.from == from && edge.to == to) preds.push_back(from);
        }
      }
      begin.push_back(static_cast<std::uint32_t>(preds.size()));
    }
  };
  pack(edges, result.pred_begin, result.preds);
  pack(loop, result.loop_begin, result.loop_preds);
  return result;
}

// Orders every node of one run before every node of the next, so that only effects within a run remain.
std::vector<Edge> all_before_all(const sg::Graph& graph) {
  std::vector<Edge> edges;
  for (std::uint32_t from = 0; from < graph.num_nodes(); ++from) {
    for (std::uint32_t to = 0; to < graph.num_nodes(); ++to) {
      if (graph.rank({from}) == graph.rank({to})) edges.push_back({from, to});
    }
  }
  return edges;
}

Harm harm_inside(const sg::Graph& graph, const std::vector<Edge>& edges) {
  return find_harm(graph, edges_of(graph, edges, all_before_all(graph)));
}

}  // namespace

TEST_CASE("the oracle calls conflicting accesses a race unless a path orders them", "[engine][oracle]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 16, .lifetime = sg::Lifetime::persistent});
  SECTION("read after write") {
    graph.add({.name = "write", .writes = {x.range(0, 8)}});
    graph.add({.name = "read", .reads = {x.range(7, 2)}});
  }
  SECTION("write after read") {
    graph.add({.name = "read", .reads = {x.range(7, 2)}});
    graph.add({.name = "write", .writes = {x.range(0, 8)}});
  }
  SECTION("write after write") {
    graph.add({.name = "write", .writes = {x.strided(0, 1, 4, 4)}});
    graph.add({.name = "write again", .writes = {x.range(12, 2)}});
  }
  SECTION("accumulate after accumulate") {
    graph.add({.name = "add", .accumulates = {x}});
    graph.add({.name = "add again", .accumulates = {x}});
  }
  CHECK(harm_inside(graph, {}) == Harm{.race = true});
  CHECK(harm_inside(graph, {{0, 1}}) == Harm{});
  CHECK(harm_inside(graph, {{1, 0}}) == Harm{.race = true});
  CHECK(find_harm(graph, edges_of(graph, {{0, 1}})) == Harm{.loop_race = true});
  CHECK(find_harm(graph, edges_of(graph, {{0, 1}}, {{1, 0}})) == Harm{});
}

TEST_CASE("the oracle calls accesses that share no byte harmless", "[engine][oracle]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 16, .lifetime = sg::Lifetime::persistent});
  graph.add({.name = "even", .writes = {x.strided(0, 1, 2, 8)}});
  graph.add({.name = "odd", .writes = {x.strided(1, 1, 2, 8)}});
  graph.add({.name = "nothing", .writes = {x.range(3, 0)}});
  CHECK(harm_inside(graph, {}) == Harm{});
}

TEST_CASE("the oracle lets readers overlap, and needs only a path between the rest", "[engine][oracle]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 4, .lifetime = sg::Lifetime::persistent});
  const sg::Buffer t = graph.token(sg::Rank{0}, "t");
  graph.add({.name = "write", .writes = {x}});
  graph.add({.name = "read", .reads = {x}});
  graph.add({.name = "read too", .reads = {x}});
  graph.add({.name = "between", .reads = {t}});  // a token that nothing writes: harmless
  graph.add({.name = "write again", .writes = {x}});
  CHECK(harm_inside(graph, {{0, 1}, {0, 2}, {1, 4}, {2, 3}, {3, 4}}) == Harm{});
  CHECK(harm_inside(graph, {{0, 1}, {0, 2}, {1, 4}, {2, 3}}) == Harm{.race = true});
  CHECK(harm_inside(graph, {{1, 0}, {0, 2}, {1, 4}, {2, 3}, {3, 4}}) == Harm{.race = true});
}

TEST_CASE("the oracle requires an order of conflicts with the next run, also for step buffers and a node with itself",
          "[engine][oracle]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 4});
  graph.add({.name = "write", .writes = {x}});
  graph.add({.name = "read", .reads = {x}});
  CHECK(find_harm(graph, edges_of(graph, {{0, 1}})) == Harm{.loop_race = true});
  CHECK(find_harm(graph, edges_of(graph, {{0, 1}}, {{0, 0}})) == Harm{.loop_race = true});  // the read is overwritten
  CHECK(find_harm(graph, edges_of(graph, {{0, 1}}, {{1, 1}})) == Harm{.loop_race = true});
  CHECK(find_harm(graph, edges_of(graph, {{0, 1}}, {{1, 0}})) == Harm{});
}

TEST_CASE("the oracle requires a lane to be a chain, also into the next run", "[engine][oracle]") {
  sg::Graph graph(2);
  const sg::Lane lane = graph.lane(sg::Rank{0}, sg::LaneKind::tp);
  graph.add({.name = "first", .lane = lane});
  graph.add({.name = "second", .lane = lane});
  graph.add({.name = "elsewhere", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::gather)});
  graph.add({.name = "on another rank", .lane = graph.lane(sg::Rank{1}, sg::LaneKind::tp)});
  const std::vector<Edge> loop{{1, 0}, {2, 2}, {3, 3}};
  CHECK(find_harm(graph, edges_of(graph, {{0, 1}}, loop)) == Harm{});
  CHECK(find_harm(graph, edges_of(graph, {{0, 1}}, {{1, 0}, {2, 2}})) == Harm{.loop_lane = true});
  CHECK(find_harm(graph, edges_of(graph, {{0, 1}}, {{0, 0}, {1, 1}, {2, 2}, {3, 3}})) == Harm{.loop_lane = true});
  CHECK(find_harm(graph, edges_of(graph, {}, {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {2, 2}, {3, 3}})) ==
        Harm{.broken_lane = true});
  CHECK(find_harm(graph, edges_of(graph, {{1, 0}}, {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {2, 2}, {3, 3}})) ==
        Harm{.broken_lane = true});
}

TEST_CASE("the oracle reports a read of step memory that no node wrote before", "[engine][oracle]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8});
  SECTION("all written") {
    graph.add({.name = "even", .writes = {x.strided(0, 1, 2, 4)}});
    graph.add({.name = "odd", .writes = {x.strided(1, 1, 2, 4)}});
    graph.add({.name = "read", .reads = {x}});
    CHECK(harm_inside(graph, {{0, 2}, {1, 2}}) == Harm{});
  }
  SECTION("one byte short") {
    graph.add({.name = "even", .writes = {x.strided(0, 1, 2, 4)}});
    graph.add({.name = "odd", .writes = {x.strided(1, 1, 2, 3)}});
    graph.add({.name = "read", .reads = {x}});
    CHECK(harm_inside(graph, {{0, 2}, {1, 2}}) == Harm{.unwritten_read = true});
  }
  SECTION("accumulated from nothing") {
    graph.add({.name = "add", .accumulates = {x}});
    CHECK(harm_inside(graph, {}) == Harm{.unwritten_read = true});
  }
  SECTION("written by the reading node itself, or by a later one") {
    graph.add({.name = "in place", .reads = {x}, .writes = {x}});
    graph.add({.name = "write", .writes = {x}});
    CHECK(harm_inside(graph, {{0, 1}}) == Harm{.unwritten_read = true});
  }
}

namespace {

// A world of `num_ranks` ranks, a group of all of them, and two buffers of 16 bytes on each.
struct Ring {
  explicit Ring(int num_ranks) : graph(num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      all.push_back(sg::Rank{rank});
      in.push_back(graph.buffer({.rank = sg::Rank{rank}, .size_bytes = 16, .lifetime = sg::Lifetime::persistent}));
      out.push_back(graph.buffer({.rank = sg::Rank{rank}, .size_bytes = 16}));
    }
    group = graph.group({.name = "all", .ranks = all});
  }
  // Reads the first `sent` bytes of `in`, writes the first `received` bytes of `out`.
  sg::Node part(int rank, sg::PartSpec spec, std::int64_t sent = 4, std::int64_t received = 4) {
    const auto i = static_cast<std::size_t>(rank);
    spec.group   = group;
    return graph.add(
        {.reads = {in[i].range(0, sent)}, .writes = {out[i].range(0, received)}, .part = spec, .rank = sg::Rank{rank}});
  }
  [[nodiscard]] Harm harm(const std::vector<Edge>& edges = {}) const {
    Harm found = harm_inside(graph, edges);
    found.race = false;  // parts overwrite `out` freely: not tested here
    return found;
  }

  sg::Graph graph;
  sg::Group group;
  std::vector<sg::Rank> all;
  std::vector<sg::Buffer> in, out;
};

constexpr Harm mismatched{.mismatched = true};
constexpr Harm unmatched{.unmatched = true};
constexpr Harm deadlock{.deadlock = true};

}  // namespace

TEST_CASE("the oracle checks the sizes of matched parts", "[engine][oracle]") {
  using enum sg::PartOp;
  Ring ring(2);
  struct Sizes {
    sg::PartOp op;
    std::int64_t sent0, received0, sent1, received1;
    Harm harm;
  };
  const std::vector<Sizes> cases{{all_reduce, 4, 4, 4, 4, {}},
                                 {all_reduce, 4, 4, 8, 8, mismatched},
                                 {all_reduce, 4, 8, 4, 8, mismatched},
                                 {all_reduce, 6, 6, 6, 6, mismatched},  // not whole elements
                                 {all_gather, 4, 8, 4, 8, {}},
                                 {all_gather, 8, 16, 4, 16, mismatched},
                                 {all_gather, 4, 8, 4, 12, mismatched},
                                 {reduce_scatter, 8, 4, 8, 4, {}},
                                 {reduce_scatter, 8, 4, 8, 8, mismatched},
                                 {reduce_scatter, 12, 4, 8, 4, mismatched},
                                 {reduce, 4, 4, 4, 0, {}},
                                 {reduce, 4, 4, 4, 4, mismatched},
                                 {reduce, 4, 4, 8, 0, mismatched},
                                 {scatter, 8, 4, 0, 4, {}},
                                 {scatter, 8, 4, 8, 4, mismatched},
                                 {gather, 4, 8, 4, 0, {}},
                                 {gather, 4, 8, 4, 8, mismatched},
                                 {gather, 4, 12, 4, 0, mismatched},
                                 {all_to_all, 8, 8, 8, 8, {}},
                                 {all_to_all, 8, 8, 16, 16, mismatched},
                                 {all_to_all, 4, 4, 4, 4, mismatched},
                                 {broadcast, 4, 4, 0, 4, {}},
                                 {broadcast, 4, 4, 9, 4, {}},
                                 {broadcast, 0, 4, 4, 4, mismatched},
                                 {broadcast, 4, 4, 0, 8, mismatched},
                                 {barrier, 1, 2, 3, 4, {}}};
  for (const Sizes& sizes : cases) {
    CAPTURE(to_string(sizes.op), sizes.sent0, sizes.received0, sizes.sent1, sizes.received1);
    Ring one = ring;
    one.part(0, {.op = sizes.op, .root = sg::Rank{0}}, sizes.sent0, sizes.received0);
    one.part(1, {.op = sizes.op, .root = sg::Rank{0}}, sizes.sent1, sizes.received1);
    CHECK(one.harm() == sizes.harm);
  }
  for (const std::int64_t received : {4, 8}) {
    Ring one = ring;
    one.part(0, {.op = send, .peer = sg::Rank{1}}, 4, 0);
    one.part(1, {.op = recv, .peer = sg::Rank{0}}, 0, received);
    CHECK(one.harm() == (received == 4 ? Harm{} : mismatched));
  }
}

TEST_CASE("the oracle compares op, type, message, and the root and reduction where they count", "[engine][oracle]") {
  using enum sg::PartOp;
  const auto pair = [](const sg::PartSpec& a, const sg::PartSpec& b) {
    Ring ring(2);
    ring.part(0, a);
    ring.part(1, b);
    return ring.harm();
  };
  CHECK(pair({.op = all_reduce}, {.op = all_reduce}) == Harm{});
  CHECK(pair({.op = all_reduce}, {.op = barrier}) == mismatched);
  CHECK(pair({.op = barrier, .type = sg::DType::u8}, {.op = barrier}) == mismatched);
  CHECK(pair({.op = barrier, .message = "a"}, {.op = barrier, .message = "b"}) == mismatched);
  CHECK(pair({.op = all_reduce, .reduction = sg::Reduction::max}, {.op = all_reduce}) == mismatched);
  CHECK(pair({.op = barrier, .reduction = sg::Reduction::max}, {.op = barrier}) == Harm{});
  CHECK(pair({.op = broadcast, .root = sg::Rank{0}}, {.op = broadcast, .root = sg::Rank{1}}) == mismatched);
  CHECK(pair({.op = barrier, .root = sg::Rank{0}}, {.op = barrier, .root = sg::Rank{1}}) == Harm{});
  CHECK(pair({.op = send, .peer = sg::Rank{1}}, {.op = recv, .peer = sg::Rank{0}}) == Harm{});
  CHECK(pair({.op = send, .peer = sg::Rank{1}, .message = "a"}, {.op = recv, .peer = sg::Rank{0}}) == mismatched);
  CHECK(pair({.op = send, .type = sg::DType::u8, .peer = sg::Rank{1}}, {.op = recv, .peer = sg::Rank{0}}) ==
        mismatched);
  CHECK(pair({.op = send, .peer = sg::Rank{1}}, {.op = send, .peer = sg::Rank{0}}) == unmatched);
  CHECK(pair({.op = send, .peer = sg::Rank{1}}, {.op = barrier}) == unmatched);
}

TEST_CASE("the oracle pairs the k-th operation of each member, by issue position", "[engine][oracle]") {
  using enum sg::PartOp;
  Ring ring(2);
  ring.part(0, {.op = barrier, .message = "a", .issue = 5});
  ring.part(0, {.op = all_reduce, .message = "b", .issue = 3});
  ring.part(1, {.op = all_reduce, .message = "b", .issue = 0});
  SECTION("in the same order") {
    ring.part(1, {.op = barrier, .message = "a", .issue = 1});
    CHECK(ring.harm() == Harm{});
    ring.part(1, {.op = barrier, .message = "a"});
    CHECK(ring.harm() == unmatched);
  }
  SECTION("a send between does not count among the collectives") {
    ring.part(1, {.op = send, .peer = sg::Rank{0}});
    ring.part(1, {.op = barrier, .message = "a", .issue = 9});
    ring.part(0, {.op = recv, .peer = sg::Rank{1}, .issue = 4});
    CHECK(ring.harm() == Harm{});
  }
  SECTION("in another order") {
    ring.part(1, {.op = barrier, .message = "a", .issue = 0});  // issued together: in the order they were added
    CHECK(ring.harm() == deadlock);                             // matched, but rank 0 does not issue them together
  }
}

TEST_CASE("the oracle reports a deadlock if ranks wait for each other", "[engine][oracle]") {
  using enum sg::PartOp;
  SECTION("two ranks that send before they receive, unless they do both together") {
    for (const std::int32_t second : {0, 1}) {
      CAPTURE(second);
      Ring ring(2);
      for (const int rank : {0, 1}) {
        ring.part(rank, {.op = send, .peer = sg::Rank{1 - rank}, .issue = 0}, 4, 0);
        ring.part(rank, {.op = recv, .peer = sg::Rank{1 - rank}, .issue = second}, 0, 4);
      }
      CHECK(ring.harm() == (second == 1 ? deadlock : Harm{}));
      // An edge or a path between parts that are issued together makes them wait for themselves.
      CHECK(ring.harm({{0, 1}}) == deadlock);
    }
  }
  SECTION("one sends first, the other receives first") {
    Ring ring(2);
    ring.part(0, {.op = send, .peer = sg::Rank{1}}, 4, 0);
    ring.part(1, {.op = recv, .peer = sg::Rank{0}}, 0, 4);
    ring.part(0, {.op = recv, .peer = sg::Rank{1}}, 0, 4);
    ring.part(1, {.op = send, .peer = sg::Rank{0}}, 4, 0);
    CHECK(ring.harm() == Harm{});
    CHECK(ring.harm({{0, 2}, {1, 3}}) == Harm{});
    CHECK(ring.harm({{2, 0}}) == deadlock);  // the edge against the issue order
  }
  SECTION("through a plain node") {
    Ring ring(2);
    ring.part(0, {.op = send, .peer = sg::Rank{1}}, 4, 0);
    ring.part(1, {.op = recv, .peer = sg::Rank{0}}, 0, 4);
    ring.graph.add({.name = "plain", .rank = sg::Rank{0}});
    CHECK(ring.harm({{2, 0}}) == Harm{});
    CHECK(ring.harm({{2, 0}, {0, 2}}) == deadlock);
    CHECK(ring.harm({{2, 2}}) == deadlock);
  }
  SECTION("two groups in opposite orders") {
    Ring ring(2);
    const sg::Group other = ring.graph.group({.name = "other", .ranks = ring.all});
    for (const int rank : {0, 1}) {
      for (const sg::Group group : rank == 0 ? std::array{ring.group, other} : std::array{other, ring.group}) {
        ring.graph.add({.part = sg::PartSpec{.group = group}, .rank = sg::Rank{rank}});
      }
    }
    CHECK(ring.harm() == deadlock);
  }
  SECTION("a ring of three, unfused and fused") {
    for (const std::int32_t second : {0, 1}) {
      CAPTURE(second);
      Ring ring(3);
      for (const int rank : {0, 1, 2}) {
        ring.part(rank, {.op = send, .peer = sg::Rank{(rank + 1) % 3}, .issue = 0}, 4, 0);
        ring.part(rank, {.op = recv, .peer = sg::Rank{(rank + 2) % 3}, .issue = second}, 0, 4);
      }
      CHECK(ring.harm() == (second == 1 ? deadlock : Harm{}));
    }
  }
}

TEST_CASE("an order that the oracle calls harmless never changes a value", "[engine][oracle]") {
  int changing = 0, racing = 0, harmless = 0;
  for (int seed = 0; seed < cases(400); ++seed) {
    CAPTURE(seed);
    Random random(static_cast<std::uint64_t>(seed));
    const sg::Graph graph =
        random_graph(static_cast<std::uint64_t>(seed), {.max_ranks = 2, .min_nodes = 3, .max_nodes = 4});
    const auto change = random.chance(60) ? Mutation::remove_edge : Mutation::remove_loop_edge;
    const auto mutant = mutate(graph, graph.edges(), change, random);
    if (!mutant) continue;
    const Harm harm    = find_harm(mutant->graph, mutant->edges);
    const bool races   = harm.race || harm.loop_race;
    const bool changes = changes_values(mutant->graph, mutant->edges);
    if (!races) CHECK_FALSE(changes);
    changing += changes ? 1 : 0;
    racing += races ? 1 : 0;
    harmless += races ? 0 : 1;
  }
  CAPTURE(changing, racing, harmless);
  CHECK(changing >= at_least(50));
  CHECK(harmless >= at_least(20));
  CHECK(changing * 2 >= racing);  // only few races swap values that no node reads
}
