#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <utility>
#include <vector>

#include "ops/transfers/hash.hpp"
#include "tests/support/ops/device_case.hpp"

namespace sg = stepgraph;

TEST_CASE("a hash of bytes on a device equals that on the CPU", "[ops][cuda]") {
  struct Part {
    std::int64_t size, offset = 0;
  };
  // Includes unaligned data. The last case needs more than one iteration of all threads.
  const auto [size, offset] = GENERATE(Part{4}, Part{12}, Part{8192}, Part{8192, 4}, Part{8192, 2}, Part{1'000'004},
                                       Part{1'000'004, 2}, Part{17'000'000});
  CAPTURE(size, offset);
  sg::Graph graph;
  const sg::Buffer bytes = graph.buffer(
      {.name = "bytes", .size_bytes = size + 4, .type = sg::DType::bf16, .lifetime = sg::Lifetime::persistent});
  const sg::Buffer hashes =
      graph.buffer({.name = "hashes", .size_bytes = 16, .type = sg::DType::i64, .lifetime = sg::Lifetime::persistent});
  std::vector<double> values;
  for (std::int64_t i = 0; i < (size + 4) / 2; ++i) values.push_back(static_cast<double>(i * i % 251 - 100));
  sg::hash_bytes(graph, {.name = "hash", .values = {bytes.range(offset, size), bytes.range(0, 2)}, .hashes = hashes});
  const auto on     = [&](bool device) { return sg::testing::run_graph(graph, {{bytes, values}}, {hashes}, device); };
  const auto device = on(true), host = on(false);
  CHECK(device == host);
}
