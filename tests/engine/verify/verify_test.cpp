#include "engine/verify/verify.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "ops/transfers/collectives.hpp"
#include "tools/examples/sharded_step.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr sg::Rank r0{0}, r1{1};

sg::Edges without(sg::Edges edges, sg::Node from, sg::Node to, bool loop = false) {
  auto& begin    = loop ? edges.loop_begin : edges.pred_begin;
  auto& preds    = loop ? edges.loop_preds : edges.preds;
  const auto row = preds.begin() + begin[to.id], end = preds.begin() + begin[to.id + 1];
  const auto found = std::find(row, end, from.id);
  REQUIRE(found != end);
  preds.erase(found);
  for (std::size_t i = to.id + 1; i < begin.size(); ++i) --begin[i];
  return edges;
}

// The first finding of a kind. One missing edge may cause several, also around the loop.
std::string first_message(const sg::Graph& graph, const sg::Edges& edges, sg::Flaw flaw) {
  for (const sg::Finding& finding : sg::find_flaws({graph, edges})) {
    if (finding.flaw == flaw) return finding.message;
  }
  return sg::str("no ", sg::to_string(flaw));
}

std::string first_message(const sg::Graph& graph, sg::Flaw flaw) { return first_message(graph, graph.edges(), flaw); }

sg::Group pair_of(sg::Graph& graph, const char* name = "pair") {
  return graph.group({.name = name, .ranks = {r0, r1}});
}

}  // namespace

TEST_CASE("a race names both nodes, rank, lanes, buffer and bytes", "[engine][verify]") {
  sg::Graph graph(2);
  const sg::Buffer x = graph.buffer({.name = "x", .rank = r1, .size_bytes = 64});
  const sg::Node a =
      graph.add({.name = "gather", .lane = graph.lane(r1, sg::LaneKind::gather), .writes = {x.range(0, 48)}});
  const sg::Node b =
      graph.add({.name = "use", .lane = graph.lane(r1, sg::LaneKind::compute), .reads = {x.strided(32, 8, 16, 1)}});
  CHECK(sg::find_flaws(graph).empty());
  CHECK_THAT(
      first_message(graph, without(graph.edges(), a, b), sg::Flaw::race),
      ContainsSubstring("rank 1 gather 'gather' writes and rank 1 compute 'use' reads bytes [32, 40) of buffer 'x'"));
}

TEST_CASE("a lane that is not a chain is reported", "[engine][verify]") {
  sg::Graph graph;
  const auto lane  = graph.lane(r0, sg::LaneKind::h2d);
  const sg::Node a = graph.add({.name = "a", .lane = lane}), b = graph.add({.name = "b", .lane = lane});
  CHECK_THAT(first_message(graph, without(graph.edges(), a, b), sg::Flaw::broken_lane),
             ContainsSubstring("rank 0 h2d 'b' is number 1 on its lane"));
}

TEST_CASE("a missing edge around the loop is reported", "[engine][verify][loop]") {
  sg::Graph graph;
  const sg::Buffer w    = graph.buffer({.name = "w", .size_bytes = 4, .lifetime = sg::Lifetime::persistent});
  const sg::Node use    = graph.add({.name = "use", .reads = {w}});
  const sg::Node update = graph.add({.name = "update", .writes = {w}});
  CHECK_THAT(
      first_message(graph, without(graph.edges(), update, use, true), sg::Flaw::loop_race),
      ContainsSubstring("'update' writes and rank 0 (no lane) 'use' of the next run reads bytes [0, 4) of buffer 'w'"));

  sg::Graph laned;
  const auto lane     = laned.lane(r0, sg::LaneKind::compute);
  const sg::Node only = laned.add({.name = "only", .lane = lane});
  CHECK_THAT(first_message(laned, without(laned.edges(), only, only, true), sg::Flaw::loop_race),
             ContainsSubstring("next run may overtake"));
}

TEST_CASE("a read that nothing wrote is reported with the bytes that are missing", "[engine][verify]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 64});
  graph.add({.name = "left", .writes = {x.strided(0, 4, 8, 8)}});
  graph.add({.name = "most of right", .writes = {x.strided(4, 4, 8, 7)}});
  graph.add({.name = "all", .reads = {x}});
  CHECK_THAT(first_message(graph, sg::Flaw::unwritten_read),
             ContainsSubstring("'all' reads bytes [60, 64) of buffer 'x'"));

  sg::Graph sum;
  const sg::Buffer y = sum.buffer({.name = "y", .size_bytes = 4});
  sum.add({.name = "add", .accumulates = {y}});
  CHECK_THAT(first_message(sum, sg::Flaw::unwritten_read), ContainsSubstring("'add' reads bytes [0, 4) of buffer 'y'"));
}

TEST_CASE("matched parts must agree", "[engine][verify][parts]") {
  const auto message = [](const sg::PartSpec& mine, const sg::PartSpec& theirs, std::int64_t my_bytes,
                          std::int64_t their_bytes) {
    sg::Graph graph(2);
    const sg::Group group = pair_of(graph);
    for (const sg::Rank rank : {r0, r1}) {
      sg::PartSpec part        = rank == r0 ? mine : theirs;
      part.group               = group;
      const std::int64_t bytes = rank == r0 ? my_bytes : their_bytes;
      const sg::Buffer x =
          graph.buffer({.name = "x", .rank = rank, .size_bytes = bytes, .lifetime = sg::Lifetime::persistent});
      graph.add({.name = "reduce", .lane = graph.lane(rank, sg::LaneKind::reduce), .accumulates = {x}, .part = part});
    }
    const auto findings = sg::find_flaws(graph);
    return findings.empty() ? std::string("none")
                            : std::string(sg::to_string(findings[0].flaw)) + ": " + findings[0].message;
  };
  using sg::PartOp;
  const sg::PartSpec good{.op = PartOp::all_reduce, .message = "grads"};
  CHECK(message(good, good, 8, 8) == "none");
  CHECK_THAT(message(good, good, 8, 16), ContainsSubstring("mismatched parts: operation 0 on group 'pair'") &&
                                             ContainsSubstring("sends 16 and receives 16 bytes") &&
                                             ContainsSubstring("sizes do not fit"));
  sg::PartSpec other = good;
  other.op           = PartOp::all_gather;
  CHECK_THAT(message(good, other, 8, 8), ContainsSubstring("rank 0 reduce 'reduce'") &&
                                             ContainsSubstring("rank 1 reduce 'reduce'") &&
                                             ContainsSubstring("differ in op"));
  other      = good;
  other.type = sg::DType::f64;
  CHECK_THAT(message(good, other, 8, 8), ContainsSubstring("differ in type"));
  other           = good;
  other.reduction = sg::Reduction::max;
  CHECK_THAT(message(good, other, 8, 8), ContainsSubstring("differ in reduction"));
  other         = good;
  other.message = "norms";
  CHECK_THAT(message(good, other, 8, 8),
             ContainsSubstring("differ in message") && ContainsSubstring("'grads'") && ContainsSubstring("'norms'"));
  const sg::PartSpec from0{.op = PartOp::broadcast, .root = r0}, from1{.op = PartOp::broadcast, .root = r1};
  CHECK_THAT(message(from0, from1, 8, 8), ContainsSubstring("differ in root"));
}

TEST_CASE("parts issued in another order than their peers are reported", "[engine][verify][parts]") {
  sg::Graph graph(2);
  const sg::Group group = pair_of(graph);
  for (const sg::Rank rank : {r0, r1}) {
    for (const char* name : {rank == r0 ? "first" : "second", rank == r0 ? "second" : "first"}) {
      graph.add({.name = name, .part = sg::PartSpec{.group = group, .message = name}, .rank = rank});
    }
  }
  const auto findings = sg::find_flaws(graph);
  REQUIRE(findings.size() == 2);
  CHECK(findings[0].flaw == sg::Flaw::mismatched_part);
}

TEST_CASE("an unmatched send is reported with the missing rank", "[engine][verify][parts]") {
  sg::Graph graph(2);
  const sg::Group group = pair_of(graph);
  const sg::Buffer x    = graph.buffer({.name = "x", .size_bytes = 4, .lifetime = sg::Lifetime::persistent});
  graph.add({.name  = "tell",
             .reads = {x},
             .part  = sg::PartSpec{.group = group, .op = sg::PartOp::send, .peer = r1, .message = "x"}});
  CHECK_THAT(first_message(graph, sg::Flaw::unmatched_part),
             ContainsSubstring("'tell'") && ContainsSubstring("has no matching part on rank 1"));
}

TEST_CASE("ranks that wait for each other are reported as a cycle", "[engine][verify][deadlock]") {
  // Each rank waits for a message from the other before it sends.
  sg::Graph graph(2);
  const sg::Group up = pair_of(graph, "up"), down = pair_of(graph, "down");
  std::vector<sg::Buffer> mine, theirs;
  for (const sg::Rank rank : {r0, r1}) {
    mine.push_back(graph.buffer({.name = "mine", .rank = rank, .size_bytes = 4, .lifetime = sg::Lifetime::persistent}));
    theirs.push_back(graph.buffer({.name = "theirs", .rank = rank, .size_bytes = 4}));
  }
  for (const sg::Rank rank : {r0, r1}) {
    const sg::Rank other = rank == r0 ? r1 : r0;
    const auto r         = static_cast<std::size_t>(sg::index(rank));
    graph.add({.name   = "hear",
               .writes = {theirs[r]},
               .part   = sg::PartSpec{.group = rank == r0 ? down : up, .op = sg::PartOp::recv, .peer = other}});
    graph.add({.name  = "speak",
               .reads = {mine[r]},
               .part  = sg::PartSpec{.group = rank == r0 ? up : down, .op = sg::PartOp::send, .peer = other}});
  }
  const std::string message = first_message(graph, sg::Flaw::deadlock);
  CHECK_THAT(message,
             ContainsSubstring("rank 0 (no lane) 'speak' waits for rank 0 (no lane) 'hear' (issued before it: 0 < 1)"));
  CHECK_THAT(message,
             ContainsSubstring("rank 1 (no lane) 'speak' waits for rank 1 (no lane) 'hear' (issued before it: 0 < 1)"));
  CHECK_THAT(message, ContainsSubstring("runs together with"));
}

TEST_CASE("parts that are issued together do not wait for each other", "[engine][verify][deadlock]") {
  // A ring: every rank sends and receives at the same time.
  constexpr int ranks = 4;
  for (const bool together : {true, false}) {
    CAPTURE(together);
    sg::Graph graph(ranks);
    std::vector<sg::Group> links;
    for (int rank = 0; rank < ranks; ++rank)
      links.push_back(
          graph.group({.name = sg::str("link", rank), .ranks = {sg::Rank{rank}, sg::Rank{(rank + 1) % ranks}}}));
    for (int rank = 0; rank < ranks; ++rank) {
      const sg::Buffer out =
          graph.buffer({.name = "out", .rank = sg::Rank{rank}, .size_bytes = 4, .lifetime = sg::Lifetime::persistent});
      const sg::Buffer in = graph.buffer({.name = "in", .rank = sg::Rank{rank}, .size_bytes = 4});
      graph.add({.name  = "send",
                 .reads = {out},
                 .part  = sg::PartSpec{.group = links[static_cast<std::size_t>(rank)],
                                       .op    = sg::PartOp::send,
                                       .peer  = sg::Rank{(rank + 1) % ranks},
                                       .issue = 0}});
      graph.add({.name   = "recv",
                 .writes = {in},
                 .part   = sg::PartSpec{.group = links[static_cast<std::size_t>((rank + ranks - 1) % ranks)],
                                        .op    = sg::PartOp::recv,
                                        .peer  = sg::Rank{(rank + ranks - 1) % ranks},
                                        .issue = together ? 0 : 1}});
    }
    CHECK(sg::find_flaws(graph).empty() == together);
  }
}

TEST_CASE("edges that form a cycle inside a rank are reported", "[engine][verify][deadlock]") {
  sg::Graph graph;
  graph.add({.name = "a"});
  graph.add({.name = "b"});
  sg::Edges edges  = graph.edges();
  edges.preds      = {1, 0};
  edges.pred_begin = {0, 1, 2};
  CHECK_THAT(first_message(graph, edges, sg::Flaw::deadlock), ContainsSubstring("'a' waits for rank 0 (no lane) 'b'"));
}

TEST_CASE("verify throws every finding in one error", "[engine][verify]") {
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 4}), y = graph.buffer({.name = "y", .size_bytes = 4});
  graph.add({.name = "a", .reads = {x}});
  graph.add({.name = "b", .reads = {y}});
  try {
    sg::verify(graph);
    FAIL("no error");
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::graph);
    CHECK_THAT(error.what(), ContainsSubstring("verify: 2 flaws\n  unwritten read: ") &&
                                 ContainsSubstring("buffer 'x'") && ContainsSubstring("buffer 'y'"));
  }
  CHECK(sg::find_flaws(graph, {.max_findings = 1}).size() == 1);
}

TEST_CASE("edges of another graph are refused", "[engine][verify][refuses]") {
  sg::Graph graph, other;
  graph.add({.name = "a"});
  CHECK_THROWS_AS(sg::find_flaws({graph, other.edges()}), sg::Error);
}

TEST_CASE("verify accepts the sharded step, and reports one that lacks an edge between uses of a slot",
          "[engine][verify]") {
  const sg::ShardedStep step = sg::sharded_step({.ranks = 2, .layers = 3, .width = 4, .batch = 2});
  CHECK(sg::find_flaws(step.graph).empty());
  // The gather of layer 2 reuses the slot of layer 0: losing that edge is the race the slots are there to prevent.
  CHECK(first_message(step.graph, without(step.graph.edges(), step.forwards[0][0], step.gathers[0][2]), sg::Flaw::race)
            .find("weight slot 0") != std::string::npos);
}

TEST_CASE("a limit of zero findings is refused", "[engine][verify][refuses]") {
  CHECK_THROWS_AS(sg::find_flaws(sg::Graph(), {.max_findings = 0}), sg::Error);
}

TEST_CASE("the rest of an access after a partial write is still checked", "[engine][verify]") {
  sg::Graph graph;
  const sg::Buffer x   = graph.buffer({.name = "x", .size_bytes = 8});
  const sg::Node whole = graph.add({.name = "whole", .writes = {x}});
  graph.add({.name = "left", .writes = {x.range(0, 4)}});
  const sg::Node right = graph.add({.name = "right", .reads = {x.range(4, 4)}});
  CHECK(sg::find_flaws(graph).empty());
  CHECK_THAT(first_message(graph, without(graph.edges(), whole, right), sg::Flaw::race),
             ContainsSubstring("bytes [4, 8) of buffer 'x'"));
}
