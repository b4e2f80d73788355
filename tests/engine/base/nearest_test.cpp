#include "engine/base/nearest.hpp"

#include <catch2/catch_test_macros.hpp>

namespace sg = stepgraph;

TEST_CASE("a mistyped name is answered with the nearest names", "[engine][base]") {
  const std::vector<std::string_view> names{"dp", "tp", "pp", "order", "devices_per_node", "sequence_parallel"};
  const auto nearest = [&](std::string_view given, std::size_t most = 1) {
    return sg::nearest_names(given, names, most);
  };
  using Names = std::vector<std::string_view>;
  CHECK(nearest("oder") == Names{"order"});
  CHECK(nearest("roder") == Names{"order"});
  CHECK(nearest("ORDER") == Names{"order"});
  CHECK(nearest("device_per_nodes") == Names{"devices_per_node"});
  CHECK(nearest("Sequence-Parallel") == Names{"sequence_parallel"});
  CHECK(nearest("dd") == Names{"dp"});
  CHECK(nearest("xp", 9) == Names{"dp", "tp", "pp"});
  CHECK(nearest("xp", 2) == Names{"dp", "tp"});
  CHECK(nearest("layout").empty());
  CHECK(nearest("").empty());
  CHECK(nearest(std::string(100'000, 'd'), 9).empty());
  CHECK(sg::did_you_mean("oder", names) == "did you mean order? ");
  CHECK(sg::did_you_mean("layout", names).empty());
}
