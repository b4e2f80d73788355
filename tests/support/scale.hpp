#pragma once
#include <algorithm>
#include <cstdlib>

namespace stepgraph::testing {

// The factor by which random tests reduce their number of cases: STEPGRAPH_TEST_SCALE, set for sanitized builds.
inline int scale() {
  const char* text = std::getenv("STEPGRAPH_TEST_SCALE");
  return text ? std::max(1, std::atoi(text)) : 1;
}

// How many of `count` cases to try, and how many of `count` hits to expect.
inline int cases(int count) { return std::max(1, count / scale()); }
inline int at_least(int count) { return count / scale(); }
// Whether to skip cases that only repeat others with different or larger numbers.
inline bool sanitized() { return scale() > 1; }

}  // namespace stepgraph::testing
