#pragma once
#include <algorithm>
#include <cstdlib>

#include "tests/support/sanitizer.hpp"

namespace stepgraph::testing {

// The factor by which random tests shrink their numbers of cases: 8 in sanitized builds, which take about that much
// longer. STEPGRAPH_TEST_SCALE changes it; tools/test --nightly sets 1.
inline int scale() {
  const char* text = std::getenv("STEPGRAPH_TEST_SCALE");
  if (text != nullptr) return std::max(1, std::atoi(text));
  return is_sanitized() ? 8 : 1;
}

// How many of `count` cases to try, and how many of `count` hits to expect.
inline int cases(int count) { return std::max(1, count / scale()); }
inline int at_least(int count) { return count / scale(); }
// The factor by which waits and time-outs of tests grow: how much slower sanitized code is. It does not depend on the
// number of cases.
inline int slowness() { return is_sanitized() ? 8 : 1; }
// Whether all cases run that are not hidden, as in tools/test --nightly.
inline bool runs_all() { return std::getenv("STEPGRAPH_TEST_SCALE") != nullptr && scale() == 1; }
// How many of `count` steps to train for where runs with many settings are compared. The third step does what the
// second did, so all of them run only in tools/test --nightly.
inline int compared_steps(int count) { return runs_all() ? count : std::min(cases(count), 5); }
// Whether to skip cases that only repeat others with different or larger numbers.
inline bool sanitized() { return scale() > 1; }
// Whether to skip this case of a test with GENERATE: in sanitized builds each `every`-th case runs. `seen` is a
// variable of the test that counts the cases; if it begins with 0, the first one runs. If `every` and the numbers of
// values have no common divisor, and there are enough cases, all values run.
inline bool left_out(int& seen, int every) { return seen++ % every != 0 && sanitized(); }
// The same in all builds, except in tools/test --nightly: for combinations of settings that each run with others too.
inline bool left_for_the_night(int& seen, int every) { return seen++ % every != 0 && !runs_all(); }

}  // namespace stepgraph::testing
