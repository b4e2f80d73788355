#include "engine/run/memory.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/run/host_memory_error.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

TEST_CASE("memory that cannot be allocated is named, with what the machine has", "[engine][memory]") {
  sg::Graph graph(1);
  const std::int64_t more_than_addresses = std::int64_t{1} << 55;
  static_cast<void>(graph.buffer(
      {.name = "large", .rank = sg::Rank{0}, .size_bytes = more_than_addresses, .space = sg::Space::pinned}));
  CHECK_THROWS_MATCHES(sg::Memory(graph), sg::HostMemoryError,
                       MessageMatches(ContainsSubstring("memory: cannot allocate 360287970189") &&
                                      ContainsSubstring(" of host memory for rank 0; this machine has ")));
}
