#pragma once
#include <algorithm>
#include <cstdlib>

namespace stepgraph::testing {

// By how much random tests shrink their numbers of cases: STEPGRAPH_TEST_SCALE, set for sanitized builds.
inline int scale() {
  const char* text = std::getenv("STEPGRAPH_TEST_SCALE");
  return text ? std::max(1, std::atoi(text)) : 1;
}

}  // namespace stepgraph::testing
