#include "ops/transfers/reduce.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <numeric>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"

namespace sg = stepgraph;

namespace {

sg::Buffer floats(sg::Graph& graph, std::int64_t count) {
  return graph.buffer({.size_bytes = 4 * count, .type = sg::DType::f32, .lifetime = sg::Lifetime::persistent});
}

}  // namespace

TEST_CASE("a node reduces one access into another and divides at the end, in tiles and in rows", "[ops][reduce]") {
  constexpr std::int64_t count = 200'000;  // several tiles
  sg::Graph graph;
  const sg::Buffer a = floats(graph, count), b = floats(graph, count), c = floats(graph, 6), d = floats(graph, 6);
  sg::reduce_into(graph, {.name = "add", .into = a, .from = b, .reduction = sg::Reduction::average});
  sg::divide(graph, {.name = "mean", .values = a.range(0, 4 * count), .count = 2});
  sg::reduce_into(graph, {.name      = "largest of two columns",
                          .into      = c.strided(0, 4, 8, 3),
                          .from      = d.strided(4, 4, 8, 3),
                          .reduction = sg::Reduction::max});
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  const sg::Program program(graph, world);
  const auto x = program.memory().span<float>(a), y = program.memory().span<float>(b);
  std::iota(x.begin(), x.end(), 0.0f);
  std::fill(y.begin(), y.end(), 2.0f);
  const auto u = program.memory().span<float>(c), v = program.memory().span<float>(d);
  std::iota(v.begin(), v.end(), 1.0f);
  u[2] = 100;
  executor.run(program);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] != (static_cast<float>(i) + 2) / 2) FAIL("element " << i);
  }
  CHECK(std::vector<float>(u.begin(), u.end()) == std::vector<float>{2, 0, 100, 0, 6, 0});
}

TEST_CASE("reductions of unequal shapes, and divisions by zero, are refused", "[ops][reduce][refuses]") {
  sg::Graph graph;
  const sg::Buffer a = floats(graph, 6), b = floats(graph, 6);
  CHECK_THROWS_AS(sg::reduce_into(graph, {.name = "r", .into = a, .from = b.range(0, 8)}), sg::Error);
  CHECK_THROWS_AS(sg::reduce_into(graph, {.name = "r", .into = a.range(0, 6), .from = b.range(0, 6)}), sg::Error);
  CHECK_THROWS_AS(sg::divide(graph, {.name = "d", .values = a, .count = 0}), sg::Error);
  const auto refuses_overlap = [&](const sg::Access& to, const sg::Access& from) {
    CHECK_THROWS_AS(sg::copy(graph, {.name = "c", .to = to, .from = from}), sg::Error);
    CHECK_THROWS_AS(sg::reduce_into(graph, {.name = "r", .into = to, .from = from}), sg::Error);
  };
  refuses_overlap(a.range(0, 16), a.range(4, 16));
  refuses_overlap(a, a);
  refuses_overlap(a.strided(0, 8, 12, 2), a.range(4, 16));
  CHECK_NOTHROW(sg::copy(graph, {.name = "columns", .to = a.strided(0, 4, 8, 3), .from = a.strided(4, 4, 8, 3)}));
}

TEST_CASE("a copy joins accesses that are cut differently", "[ops][copy]") {
  sg::Graph graph;
  const sg::Buffer a = floats(graph, 6), b = floats(graph, 6);
  sg::copy(graph, {.name = "copy",
                   .to   = sg::AccessList{b.range(12, 12), b.range(0, 12)},
                   .from = sg::AccessList{a.strided(0, 4, 8, 3), a.strided(4, 4, 8, 3)}});
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const sg::Program program(graph, world);
  const auto x = program.memory().span<float>(a), y = program.memory().span<float>(b);
  std::iota(x.begin(), x.end(), 0.0f);
  executor.run(program);
  CHECK(std::vector<float>(y.begin(), y.end()) == std::vector<float>{1, 3, 5, 0, 2, 4});
}

TEST_CASE("a copy joins many accesses, each in several tiles or far smaller than one", "[ops][copy]") {
  constexpr std::int64_t total = 1'300'000;  // several tiles
  sg::Graph graph;
  const auto kept = [&](const char* name) {
    return graph.buffer(
        {.name = name, .size_bytes = total, .type = sg::DType::u8, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer from = kept("from"), to = kept("to");
  // Pieces of growing sizes on one side, and of equal sizes on the other. The last piece takes the rest.
  const auto cut = [](sg::Buffer buffer, std::int64_t size, std::int64_t growth) {
    sg::AccessList out;
    for (std::int64_t at = 0; at < total; at += size, size += growth)
      out.push_back(buffer.range(at, std::min(size, total - at)));
    return out;
  };
  sg::copy(graph, {.name = "join", .to = cut(to, 3, 1'000), .from = cut(from, 70'001, 0)});
  sg::LoopbackWorld world(1);
  const sg::Program program(graph, world);
  const std::span<std::uint8_t> values = program.memory().span<std::uint8_t>(from);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint8_t>(i * 7 + i / 251);
  sg::Executor({.threads = 2}).run(program);
  const std::span<std::uint8_t> found = program.memory().span<std::uint8_t>(to);
  CHECK(std::equal(found.begin(), found.end(), values.begin()));
}

TEST_CASE("copies between pinned and device memory run on their own lanes", "[ops][copy]") {
  constexpr std::int64_t count = 100'000;  // several tiles
  sg::Graph graph;
  const auto bytes = [&](sg::Space space) {
    return graph.buffer({.size_bytes = count, .space = space, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer from = bytes(sg::Space::pinned), there = bytes(sg::Space::device), back = bytes(sg::Space::pinned);
  const sg::Node in  = sg::copy(graph, {.name = "in", .lane = sg::LaneKind::h2d, .to = there, .from = from});
  const sg::Node out = sg::copy(graph, {.name = "out", .lane = sg::LaneKind::d2h, .to = back, .from = there});
  CHECK(graph.kind(in) == sg::NodeKind::copy);
  CHECK(graph.device(out));
  CHECK(graph.cost(out).bytes_moved == 2.0 * count);
  CHECK(sg::reaches(graph, in, out));
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 2});
  const sg::Program program(graph, world);
  std::vector<std::uint8_t> given(count), found(count);
  for (std::size_t i = 0; i < given.size(); ++i) given[i] = static_cast<std::uint8_t>(i * 7 + (i >> 8));
  program.memory().write(from, std::span<const std::uint8_t>(given));
  executor.run(program);
  program.memory().read(back, std::span(found));
  CHECK((found == given));
}
