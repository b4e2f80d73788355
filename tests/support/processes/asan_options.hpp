#pragma once

namespace stepgraph::testing {

// ASAN_OPTIONS of a command that a test runs. A search for leaks takes seconds at the end of each process, so there is
// none. Each allocation keeps two of its callers, not 30, as in tests/CMakeLists.txt.
inline constexpr const char* asan_options_of_command = "detect_leaks=0:malloc_context_size=2";

}  // namespace stepgraph::testing
