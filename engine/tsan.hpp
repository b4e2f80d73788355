#pragma once

// Happens-before, as the graph's edges say it, told to ThreadSanitizer. Files that include Taskflow or TBB are compiled
// without instrumentation (tools/cmake/StepgraphTargets.cmake), so nothing but these calls orders two node bodies in
// its eyes: a body that touches what its node did not declare is reported. They compile to nothing in other builds.
#if defined(STEPGRAPH_TSAN)
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
}
#endif

namespace stepgraph::tsan {

#if defined(STEPGRAPH_TSAN)
inline constexpr bool enabled = true;
inline void acquire(const void* address) { __tsan_acquire(const_cast<void*>(address)); }
inline void release(const void* address) { __tsan_release(const_cast<void*>(address)); }
// The locks of a scheduler order threads by chance; between these two calls they count for nothing.
inline void enter_scheduler() { AnnotateIgnoreSyncBegin(__FILE__, __LINE__); }
inline void leave_scheduler() { AnnotateIgnoreSyncEnd(__FILE__, __LINE__); }
#else
inline constexpr bool enabled = false;
inline void acquire(const void*) {}
inline void release(const void*) {}
inline void enter_scheduler() {}
inline void leave_scheduler() {}
#endif

}  // namespace stepgraph::tsan
