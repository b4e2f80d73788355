#pragma once

// Tells ThreadSanitizer that nodes happen before each other along the graph's edges, and only along them. Files that
// include Taskflow or TBB are compiled without instrumentation (stepgraph_hide_from_tsan), so ThreadSanitizer sees no
// order between two bodies but these calls. A body that uses memory that its node did not declare is then reported.
// The calls compile to nothing in other builds.
#if defined(STEPGRAPH_TSAN)
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace stepgraph::tsan {

#if defined(STEPGRAPH_TSAN)
inline constexpr bool enabled = true;
inline void acquire(const void* address) { __tsan_acquire(const_cast<void*>(address)); }
inline void release(const void* address) { __tsan_release(const_cast<void*>(address)); }
// The locks of a scheduler order threads by chance, and ThreadSanitizer does not see how its memory passes between
// threads. Between these two calls both are ignored.
inline constinit thread_local int scheduler_depth = 0;
inline bool inside_scheduler() { return scheduler_depth > 0; }
inline void enter_scheduler() {
  ++scheduler_depth;
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
inline void leave_scheduler() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  --scheduler_depth;
}
#else
inline constexpr bool enabled = false;
inline void acquire(const void*) {}
inline void release(const void*) {}
inline bool inside_scheduler() { return false; }
inline void enter_scheduler() {}
inline void leave_scheduler() {}
#endif

// Leaves the scheduler while it lives, if the thread is inside.
class OutsideScheduler {
 public:
  OutsideScheduler() : was_inside_(inside_scheduler()) {
    if (was_inside_) leave_scheduler();
  }
  ~OutsideScheduler() {
    if (was_inside_) enter_scheduler();
  }
  OutsideScheduler(const OutsideScheduler&)            = delete;
  OutsideScheduler& operator=(const OutsideScheduler&) = delete;

 private:
  bool was_inside_;
};

}  // namespace stepgraph::tsan
