#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/transfers/collectives.hpp"
#include "tests/support/worlds/waiting_world.hpp"

namespace sg = stepgraph;

namespace {

constexpr int num_ranks = 4;

// A ring of messages and an all-reduce, for all ranks or for one.
sg::Graph build(std::optional<sg::Rank> only) {
  sg::Graph graph = only ? sg::Graph(num_ranks, *only) : sg::Graph(num_ranks);
  const auto here = [&](int rank) { return !only || *only == sg::Rank{rank}; };
  std::vector<sg::Group> links(num_ranks);
  std::vector<sg::Buffer> x(num_ranks), y(num_ranks), sum(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const sg::Rank next{(rank + 1) % num_ranks};
    if (here(rank) || (only && next == *only))
      links[static_cast<std::size_t>(rank)] =
          graph.group({.name = sg::str("link", rank), .ranks = {sg::Rank{rank}, next}});
  }
  const sg::Group all = graph.group({.name = "all", .ranks = {sg::Rank{0}, sg::Rank{1}, sg::Rank{2}, sg::Rank{3}}});
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!here(rank)) continue;
    const auto r = static_cast<std::size_t>(rank);
    x[r]         = graph.buffer({.name = "x", .rank = sg::Rank{rank}, .size_bytes = 8, .type = sg::DType::f32});
    y[r]         = graph.buffer({.name = "y", .rank = sg::Rank{rank}, .size_bytes = 8, .type = sg::DType::f32});
    sum[r]       = graph.buffer({.name       = "sum",
                                 .rank       = sg::Rank{rank},
                                 .size_bytes = 8,
                                 .type       = sg::DType::f32,
                                 .lifetime   = sg::Lifetime::persistent});
    graph.add({.name = "make", .lane = graph.lane(sg::Rank{rank}, sg::LaneKind::compute), .writes = {x[r]}},
              [rank](const sg::Context& c) {
                for (float& value : c.write<float>()) value = static_cast<float>(rank + 1);
              });
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto next = static_cast<std::size_t>((rank + 1) % num_ranks);
    if (!here(rank) && !here(static_cast<int>(next))) continue;
    sg::send_recv(graph, {.name  = sg::str("pass", rank),
                          .group = links[static_cast<std::size_t>(rank)],
                          .from  = sg::Rank{rank},
                          .to    = sg::Rank{static_cast<int>(next)},
                          .in    = [&] { return x[static_cast<std::size_t>(rank)]; },
                          .out   = [&] { return y[next]; }});
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!here(rank)) continue;
    const auto r = static_cast<std::size_t>(rank);
    graph.add({.name   = "add",
               .lane   = graph.lane(sg::Rank{rank}, sg::LaneKind::compute),
               .reads  = {x[r], y[r]},
               .writes = {sum[r]}},
              [](const sg::Context& c) {
                for (std::size_t i = 0; i < 2; ++i)
                  c.write<float>()[i] = c.read<float>(0)[i] + 10 * c.read<float>(1)[i];
              });
  }
  sg::all_reduce(graph, {.name = "total", .group = all, .in = [&](sg::Rank rank) {
                           return sum[static_cast<std::size_t>(sg::index(rank))];
                         }});
  return graph;
}

}  // namespace

TEST_CASE("a slice built alone equals the slice of the whole", "[engine][slice]") {
  const sg::Graph whole = build({});
  sg::verify(whole);
  for (int rank = 0; rank < num_ranks; ++rank) {
    CAPTURE(rank);
    const sg::Graph alone = build(sg::Rank{rank});
    CHECK(sg::slice(whole, sg::Rank{rank}) == alone);
    CHECK_NOTHROW(sg::verify(alone));
    CHECK_FALSE(alone == sg::slice(whole, sg::Rank{(rank + 1) % num_ranks}));
  }
}

TEST_CASE("the bodies of a slice find their own buffers", "[engine][slice]") {
  sg::Graph graph(2);
  std::vector<sg::Buffer> out;
  for (int rank = 0; rank < 2; ++rank) {
    out.push_back(graph.buffer({.name = "out", .rank = sg::Rank{rank}, .size_bytes = 4, .type = sg::DType::i32}));
    graph.add({.name = "n", .writes = {out.back()}},
              [rank](const sg::Context& c) { c.write<std::int32_t>()[0] = 100 + rank; });
  }
  const sg::Graph second = sg::slice(graph, sg::Rank{1});
  sg::testing::WaitingWorld world(2, sg::Rank{1});
  sg::Executor executor({.threads = 1});
  const sg::Program program(second, world);
  executor.run(program);
  CHECK(program.memory().span<std::int32_t>(sg::Buffer{0})[0] == 101);
}

TEST_CASE("a slice of another rank than the graph holds is refused", "[engine][slice][refuses]") {
  const sg::Graph graph(4, sg::Rank{2});
  CHECK_THROWS_MATCHES(
      sg::slice(graph, sg::Rank{1}), sg::Error,
      Catch::Matchers::MessageMatches(Catch::Matchers::ContainsSubstring("rank 1 of a graph that holds only rank 2")));
}
