#pragma once
#include <cstddef>

// For loops that are compiled without ThreadSanitizer (stepgraph_hide_from_tsan): they tell it what they read and write
// range by range, which is many times faster than element by element. The calls compile to nothing in other builds.
#if defined(STEPGRAPH_TSAN)
extern "C" {
void __tsan_read_range(void* address, unsigned long num_bytes);
void __tsan_write_range(void* address, unsigned long num_bytes);
}
#endif

namespace stepgraph {

#if defined(STEPGRAPH_TSAN)
inline constexpr bool watches = true;
inline void watch_read(const void* from, std::size_t num_bytes) {
  if (num_bytes > 0) __tsan_read_range(const_cast<void*>(from), num_bytes);
}
inline void watch_write(void* to, std::size_t num_bytes) {
  if (num_bytes > 0) __tsan_write_range(to, num_bytes);
}
#else
inline constexpr bool watches = false;
inline void watch_read(const void*, std::size_t) {}
inline void watch_write(void*, std::size_t) {}
#endif

}  // namespace stepgraph
