// Sets of bytes, and strided accesses to offloaded buffers.
#include "graphs/step/offload/bytes.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "engine/verify/verify.hpp"
#include "graphs/predict/offload_report.hpp"
#include "graphs/step/offload/homes.hpp"

namespace sg = stepgraph;

TEST_CASE("bytes between the rows of a write keep their values", "[graphs][offload]") {
  const int rows = GENERATE(100, 5000);
  CAPTURE(rows);
  sg::Graph graph;
  const sg::Lane lane     = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  const sg::Buffer weight = graph.buffer({.name       = "w",
                                          .size_bytes = std::int64_t{8} * rows,
                                          .type       = sg::DType::f32,
                                          .lifetime   = sg::Lifetime::persistent});
  graph.add({.name = "write", .lane = lane, .writes = weight.strided(0, 4, 8, rows), .labels = {.phase = "a"}});
  const sg::WithHomes made = with_homes(graph, {.homes = {{.buffer = weight, .unit = "w"}}});
  sg::verify(made.graph);
  // One copy writes all rows back, with the bytes between them. So these are copied to the slot before.
  const sg::TransferBytes moved = sg::transfer_bytes(made.graph);
  CHECK(moved.d2h == 8 * rows - 4);
  CHECK(moved.h2d == 8 * (rows - 1) - 4);
}

TEST_CASE("a set of bytes holds the rows of strided regions, however many", "[graphs][offload]") {
  using sg::offload::ByteSet;
  constexpr std::int64_t rows = 200'000;
  ByteSet even, odd;
  even.add(sg::Region{.offset = 0, .length = 4, .stride = 8, .count = rows});
  odd.add(sg::Region{.offset = 4, .length = 4, .stride = 8, .count = rows});
  CHECK(even.num_bytes() == 4 * rows);
  CHECK(even.ranges().size() == rows);
  CHECK(even.without(odd).num_bytes() == 4 * rows);
  even.add(odd);  // between all of its ranges
  REQUIRE(even.ranges().size() == 1);
  CHECK(even.num_bytes() == 8 * rows);
  CHECK(even.without(odd).num_bytes() == 4 * rows);

  ByteSet parts({10, 20});
  parts.add(sg::ByteInterval{30, 40});
  ByteSet others({0, 5});
  others.add(sg::ByteInterval{15, 32});
  others.add(sg::ByteInterval{50, 60});
  parts.add(others);
  REQUIRE(parts.ranges().size() == 3);
  CHECK(parts.num_bytes() == 5 + 30 + 10);
  CHECK(parts.hull().end == 60);
}
