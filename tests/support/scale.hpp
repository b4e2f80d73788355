#pragma once
#include <algorithm>
#include <cstdlib>

namespace stepgraph::testing {

// By how much random tests shrink their numbers of cases: STEPGRAPH_TEST_SCALE, set for sanitized builds.
inline int scale() {
  const char* text = std::getenv("STEPGRAPH_TEST_SCALE");
  return text ? std::max(1, std::atoi(text)) : 1;
}

// How many of `count` cases to try, and how many of `count` hits to expect then.
inline int cases(int count) { return std::max(1, count / scale()); }
inline int at_least(int count) { return count / scale(); }
// Whether a case that only repeats with other numbers, or with more of them, what others do is to be left out.
inline bool sanitized() { return scale() > 1; }

}  // namespace stepgraph::testing
