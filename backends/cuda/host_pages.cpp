#include "backends/cuda/host_pages.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

namespace stepgraph::cuda {
namespace {

// Calls f(begin, end) for ranges of [0, size) that begin at whole pages, on all cores.
template <class F>
void for_all_pages(std::size_t size, const F& f) {
  constexpr std::size_t worth_a_thread = std::size_t{32} << 20;
  const std::size_t cores              = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t count              = std::clamp<std::size_t>(size / worth_a_thread, 1, cores);
  const std::size_t each               = (size / count + page_size - 1) / page_size * page_size;
  const auto part                      = [&f, size, each](std::size_t i) {
    const std::size_t begin = std::min(size, i * each), end = std::min(size, begin + each);
    if (begin < end) f(begin, end);
  };
  std::vector<std::jthread> others;  // which join when they go
  std::size_t next = 1;
  try {
    for (; next < count; ++next) others.emplace_back([&part, next] { part(next); });
  } catch (const std::system_error&) {  // there are no more threads: the rest is done here
  }
  part(0);
  for (; next < count; ++next) part(next);
}

// The number behind a name in a file of the kernel; with an empty name, the first number. None: there is no such file
// or number ("max").
std::optional<std::size_t> number_in(const char* path, std::string_view name) {
  std::ifstream file(path);
  std::size_t number = 0;
  for (std::string word; !name.empty() && file >> word;) {
    if (word == name) return file >> number ? std::optional(number) : std::nullopt;
  }
  return name.empty() && file >> number ? std::optional(number) : std::nullopt;
}

// Memory that this process can get without being ended by the kernel. Cached files give way.
std::size_t free_memory() {
  constexpr std::size_t kib = 1024;
  std::size_t free          = number_in("/proc/meminfo", "MemAvailable:").value_or(0) * kib;
  // The limit of a container, in both versions of control groups.
  const auto apply = [&](const char* limit_path, const char* used_path, const char* stat_path,
                         const char* cached_name) {
    const auto limit = number_in(limit_path, ""), used = number_in(used_path, "");
    if (!limit || !used) return;
    const std::size_t in_use = *used - std::min(*used, number_in(stat_path, cached_name).value_or(0));
    free                     = std::min(free, *limit > in_use ? *limit - in_use : 0);
  };
  apply("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "file");
  apply("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat", "cache");
  return free;
}

}  // namespace

std::byte* map_pages(std::size_t size) {
  constexpr std::size_t spare = std::size_t{1} << 30;  // for everything else
  if (size + spare > free_memory()) return nullptr;    // the kernel would end a process that touches them
  void* const all = mmap(nullptr, size + page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(all);
  const auto before  = (page_size - address % page_size) % page_size;
  auto* const pages  = static_cast<std::byte*>(all) + before;
  if (before > 0) munmap(all, before);
  munmap(pages + size, page_size - before);
  (void)madvise(pages, size, MADV_HUGEPAGE);  // only a hint
  for_all_pages(size, [pages](std::size_t begin, std::size_t end) {
    constexpr std::size_t smallest = 4096;
    for (std::size_t at = begin; at < end; at += smallest) const_cast<volatile std::byte&>(pages[at]) = std::byte{0};
  });
  return pages;
}

void unmap_pages(std::byte* pages, std::size_t size) noexcept { munmap(pages, size); }

void clear_pages(std::byte* bytes, std::size_t size) {
  for_all_pages(size, [bytes](std::size_t begin, std::size_t end) { std::memset(bytes + begin, 0, end - begin); });
}

}  // namespace stepgraph::cuda
