#include "tests/support/allocations.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::int64_t> count{0}, bytes{0};
}

namespace stepgraph::testing {
std::int64_t allocations() { return count.load(); }
std::int64_t allocated_bytes() { return bytes.load(); }
}  // namespace stepgraph::testing

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {
void* allocate(std::size_t size, std::size_t alignment) {
  count.fetch_add(1, std::memory_order_relaxed);
  bytes.fetch_add(static_cast<std::int64_t>(size), std::memory_order_relaxed);
  void* const made = alignment <= alignof(std::max_align_t)
                         ? std::malloc(size == 0 ? 1 : size)
                         : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (made == nullptr) throw std::bad_alloc();
  return made;
}
}  // namespace

void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new[](std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t align) { return allocate(size, static_cast<std::size_t>(align)); }
void* operator new[](std::size_t size, std::align_val_t align) {
  return allocate(size, static_cast<std::size_t>(align));
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete[](void* made) noexcept { std::free(made); }
void operator delete(void* made, std::size_t) noexcept { std::free(made); }
void operator delete[](void* made, std::size_t) noexcept { std::free(made); }
void operator delete(void* made, std::align_val_t) noexcept { std::free(made); }
void operator delete[](void* made, std::align_val_t) noexcept { std::free(made); }
void operator delete(void* made, std::size_t, std::align_val_t) noexcept { std::free(made); }
void operator delete[](void* made, std::size_t, std::align_val_t) noexcept { std::free(made); }
#endif
