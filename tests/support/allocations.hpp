#pragma once
#include <cstdint>

namespace stepgraph::testing {

// Calls of operator new in this process so far, on all threads. Not counted under sanitizers: replacing their allocator
// would disable some of its checks.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool counts_allocations = false;
#else
inline constexpr bool counts_allocations = true;
#endif
[[nodiscard]] std::int64_t allocations();

}  // namespace stepgraph::testing
