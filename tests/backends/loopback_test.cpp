#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <numeric>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/transfers/collectives.hpp"

namespace sg = stepgraph;

namespace {

// One collective over all ranks, in its own graph; member r's element i starts as 100 * r + i.
struct Trial {
  explicit Trial(int num_ranks) : ranks(num_ranks), graph(num_ranks), world(num_ranks) {
    std::vector<sg::Rank> members;
    for (int rank = 0; rank < ranks; ++rank) members.push_back(sg::Rank{rank});
    group = graph.group({.name = "all", .ranks = members});
  }
  std::vector<sg::Buffer> buffers(int elements, const char* name) {
    std::vector<sg::Buffer> made;
    for (int rank = 0; rank < ranks; ++rank) {
      made.push_back(graph.buffer({.name       = name,
                                   .rank       = sg::Rank{rank},
                                   .size_bytes = 4 * elements,
                                   .type       = sg::DType::f32,
                                   .lifetime   = sg::Lifetime::persistent}));
    }
    return made;
  }
  static std::function<sg::Access(sg::Rank)> whole(const std::vector<sg::Buffer>& list) {
    return [&list](sg::Rank rank) { return sg::Access(list[static_cast<std::size_t>(sg::index(rank))]); };
  }
  std::vector<std::vector<float>> run(const std::vector<sg::Buffer>& in, const std::vector<sg::Buffer>& out) {
    sg::verify(graph);
    sg::Executor executor({.threads = 2});
    const sg::Program program(graph, world);
    CHECK(program.num_tasks() == 1);  // matched parts are one task
    for (std::size_t rank = 0; rank < in.size(); ++rank) {
      const auto values = program.memory().span<float>(in[rank]);
      std::iota(values.begin(), values.end(), 100.0f * static_cast<float>(rank));
    }
    executor.run(program);
    std::vector<std::vector<float>> results;
    for (const sg::Buffer buffer : out) {
      const auto values = program.memory().span<float>(buffer);
      results.emplace_back(values.begin(), values.end());
    }
    return results;
  }

  int ranks;
  sg::Graph graph;
  sg::Group group;
  sg::LoopbackWorld world;
};

float element(int rank, int i) { return static_cast<float>(100 * rank + i); }

}  // namespace

TEST_CASE("all_reduce gives every member the reduction, in place or not", "[backends][loopback]") {
  const int ranks     = GENERATE(1, 2, 5);
  const int elements  = GENERATE(1, 7, 50'000);  // one tile, and several
  const bool in_place = GENERATE(true, false);
  CAPTURE(ranks, elements, in_place);
  Trial trial(ranks);
  const auto in = trial.buffers(elements, "in"), out = in_place ? in : trial.buffers(elements, "out");
  sg::all_reduce(
      trial.graph,
      {.name = "sum", .group = trial.group, .in = Trial::whole(in), .out = in_place ? nullptr : Trial::whole(out)});
  for (const auto& result : trial.run(in, out)) {
    for (int i = 0; i < elements; ++i) {
      float expected = 0;
      for (int rank = 0; rank < ranks; ++rank) expected += element(rank, i);
      if (result[static_cast<std::size_t>(i)] != expected) FAIL("element " << i);
    }
  }
}

TEST_CASE("each reduction computes what its name says", "[backends][loopback]") {
  const auto [reduction, expected] =
      GENERATE(std::pair{sg::Reduction::sum, 306.0f}, std::pair{sg::Reduction::average, 102.0f},
               std::pair{sg::Reduction::min, 2.0f}, std::pair{sg::Reduction::max, 202.0f},
               std::pair{sg::Reduction::product, 2.0f * 102.0f * 202.0f});
  CAPTURE(sg::to_string(reduction));
  Trial trial(3);
  const auto in = trial.buffers(4, "in");
  sg::all_reduce(trial.graph, {.name = "r", .group = trial.group, .in = Trial::whole(in), .reduction = reduction});
  CHECK(trial.run(in, in)[2][2] == expected);
}

TEST_CASE("all_gather, reduce_scatter and broadcast move the right elements", "[backends][loopback]") {
  const int ranks    = GENERATE(1, 2, 3);
  const int elements = GENERATE(2, 30'000);
  CAPTURE(ranks, elements);
  {
    Trial trial(ranks);
    const auto in = trial.buffers(elements, "in"), out = trial.buffers(elements * ranks, "out");
    sg::all_gather(trial.graph, {.name = "g", .group = trial.group, .in = Trial::whole(in), .out = Trial::whole(out)});
    for (const auto& result : trial.run(in, out)) {
      for (int i = 0; i < elements * ranks; ++i) {
        if (result[static_cast<std::size_t>(i)] != element(i / elements, i % elements))
          FAIL("all_gather element " << i);
      }
    }
  }
  {
    Trial trial(ranks);
    const auto in = trial.buffers(elements * ranks, "in"), out = trial.buffers(elements, "out");
    sg::reduce_scatter(trial.graph,
                       {.name = "s", .group = trial.group, .in = Trial::whole(in), .out = Trial::whole(out)});
    const auto results = trial.run(in, out);
    for (int rank = 0; rank < ranks; ++rank) {
      for (int i = 0; i < elements; ++i) {
        float expected = 0;
        for (int member = 0; member < ranks; ++member) expected += element(member, rank * elements + i);
        if (results[static_cast<std::size_t>(rank)][static_cast<std::size_t>(i)] != expected)
          FAIL("reduce_scatter element " << i);
      }
    }
  }
  {
    Trial trial(ranks);
    const auto in = trial.buffers(elements, "in"), out = trial.buffers(elements, "out");
    sg::broadcast(trial.graph, {.name  = "b",
                                .group = trial.group,
                                .in    = Trial::whole(in),
                                .out   = Trial::whole(out),
                                .root  = sg::Rank{ranks - 1}});
    for (const auto& result : trial.run(in, out)) {
      for (int i = 0; i < elements; ++i) {
        if (result[static_cast<std::size_t>(i)] != element(ranks - 1, i)) FAIL("broadcast element " << i);
      }
    }
  }
}

TEST_CASE("strided parts are concatenated", "[backends][loopback]") {
  Trial trial(2);
  const auto in = trial.buffers(6, "in"), out = trial.buffers(4, "out");
  sg::send_recv(trial.graph, {.name  = "columns",
                              .group = trial.group,
                              .from  = sg::Rank{0},
                              .to    = sg::Rank{1},
                              .in    = [&] { return in[0].strided(4, 8, 12, 2); },  // elements 1, 2 and 4, 5
                              .out   = [&] { return sg::Access(out[1]); }});
  CHECK(trial.run(in, out)[1] == std::vector<float>{1, 2, 4, 5});
}

TEST_CASE("integers are averaged as integers, for any number of ranks", "[backends][loopback]") {
  constexpr int ranks = 256;
  sg::Graph graph(ranks);
  std::vector<sg::Rank> members;
  std::vector<sg::Buffer> x;
  for (int rank = 0; rank < ranks; ++rank) {
    members.push_back(sg::Rank{rank});
    x.push_back(graph.buffer({.name       = "x",
                              .rank       = sg::Rank{rank},
                              .size_bytes = 8,
                              .type       = sg::DType::i32,
                              .lifetime   = sg::Lifetime::persistent}));
  }
  const sg::Group all = graph.group({.name = "all", .ranks = members});
  sg::all_reduce(graph, {.name = "mean", .group = all, .in = Trial::whole(x), .reduction = sg::Reduction::average});
  sg::LoopbackWorld world(ranks);
  sg::Executor executor({.threads = 2});
  const sg::Program program(graph, world);
  for (const sg::Buffer buffer : x) program.memory().span<std::int32_t>(buffer)[1] = -7;
  executor.run(program);
  CHECK(program.memory().span<std::int32_t>(x[3])[1] == -7);
}

TEST_CASE("a part of another type than its buffer is refused; a collective uses the type of its buffers",
          "[backends][loopback][refuses]") {
  sg::Graph graph(1);
  const sg::Group group = graph.group({.name = "g", .ranks = {sg::Rank{0}}});
  const sg::Buffer x =
      graph.buffer({.name = "x", .size_bytes = 8, .type = sg::DType::f64, .lifetime = sg::Lifetime::persistent});
  CHECK_THROWS_MATCHES(
      graph.add({.name = "r", .accumulates = {x}, .part = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce}}),
      sg::Error,
      Catch::Matchers::MessageMatches(Catch::Matchers::ContainsSubstring("its type is f32, but buffer 'x' holds f64")));
  const auto nodes =
      sg::all_reduce(graph, {.name = "r", .group = group, .in = [x](sg::Rank) { return sg::Access(x); }});
  CHECK(graph.part(nodes[0]).type == sg::DType::f64);
  CHECK_THROWS_AS(sg::all_reduce(graph, {.name = "no group", .in = [x](sg::Rank) { return sg::Access(x); }}),
                  sg::Error);
}

TEST_CASE("a receiver may declare other reads; the message goes to the bytes it writes", "[backends][loopback]") {
  Trial trial(2);
  const auto in = trial.buffers(4, "in"), out = trial.buffers(4, "out"), other = trial.buffers(4, "other");
  trial.graph.add({.name  = "m",
                   .reads = {in[0]},
                   .part  = sg::PartSpec{.group = trial.group, .op = sg::PartOp::send, .peer = sg::Rank{1}}});
  trial.graph.add({.name   = "m",
                   .reads  = {other[1]},
                   .writes = {out[1]},
                   .part   = sg::PartSpec{.group = trial.group, .op = sg::PartOp::recv, .peer = sg::Rank{0}}});
  CHECK(trial.run(in, out)[1] == std::vector<float>{0, 1, 2, 3});
}
