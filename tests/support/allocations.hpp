#pragma once
#include <cstdint>

#include "tests/support/sanitizer.hpp"

namespace stepgraph::testing {

// Calls of operator new in this process so far, on all threads. Not counted under sanitizers: replacing their allocator
// would disable some of its checks.
[[nodiscard]] inline bool counts_allocations() noexcept { return !is_sanitized(); }
[[nodiscard]] std::int64_t allocations();
[[nodiscard]] std::int64_t allocated_bytes();  // that were asked for so far; freed ones count too

}  // namespace stepgraph::testing
