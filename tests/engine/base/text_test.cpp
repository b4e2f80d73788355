#include "engine/base/text.hpp"

#include <catch2/catch_test_macros.hpp>

namespace sg = stepgraph;

TEST_CASE("a table has columns as wide as their widest cells", "[engine][base]") {
  CHECK(sg::table_text({{"kind", "rate"}, {"dualpipe-v", "0.1"}, {"x", "12.25"}}) ==
        "kind         rate\n"
        "dualpipe-v    0.1\n"
        "x           12.25\n");
  CHECK(sg::table_text({{"a", "b"}, {"c", ""}}) == "a  b\nc\n");  // no blanks at the end of a line
  CHECK(sg::table_text({}).empty());
}
