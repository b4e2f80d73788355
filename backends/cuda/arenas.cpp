#include "backends/cuda/arenas.hpp"

#include <cstdlib>

#include "backends/cuda/check.hpp"
#include "backends/cuda/host_pages.hpp"
#include "engine/base/error.hpp"
#include "engine/run/host_memory_error.hpp"

namespace stepgraph::cuda {

namespace {

std::byte* pageable(std::size_t size, const std::string& what) {
  constexpr std::size_t page = 4096;
  void* const bytes          = std::aligned_alloc(page, (size + page - 1) / page * page);
  if (bytes == nullptr)
    throw HostMemoryError(str("cuda: ", what, " needs ", size, " bytes of host memory, which are not free"));
  return static_cast<std::byte*>(bytes);
}

}  // namespace

std::byte* Arenas::allocate(Rank rank, Space space, std::size_t size) {
  queues_.check_usable();
  const std::string what = str("the planned arena of rank ", rank);
  if (space == Space::pinned) {
    if (pinned_) return queues_.heap().pin_zeroed(size, what);
    std::byte* const bytes = pageable(size, what);
    clear_pages(bytes, size);
    return bytes;
  }
  const int device       = queues_.device_of(rank);
  std::byte* const bytes = queues_.heap().allocate(device, size, what);
  try {
    queues_.clear(device, bytes, size);
  } catch (...) {
    queues_.heap().release(device, bytes);
    throw;
  }
  return bytes;
}

void Arenas::release(Rank rank, Space space, std::byte* bytes) noexcept {
  if (queues_.abandoned()) return;  // the device may still use them
  try {
    queues_.synchronize();
  } catch (const Error&) {  // already reported
  }
  if (space != Space::pinned) {
    queues_.heap().release(queues_.device_of(rank), bytes);
  } else if (pinned_) {
    queues_.heap().unpin(bytes);
  } else {
    std::free(bytes);
  }
}

std::int64_t Arenas::size_bytes(Rank rank) const {
  const int device = queues_.device_of(rank);
  std::int64_t num = 0;
  for (const Rank other : queues_.ranks()) num += queues_.device_of(other) == device;
  const OnDevice here(device);
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for the memory of a device");
  return static_cast<std::int64_t>(total) / num;
}

void Arenas::read(const std::byte* from, std::span<std::byte> to) {
  queues_.copy(to.data(), from, to.size(), "reading");
}

void Arenas::write(std::byte* to, std::span<const std::byte> from) {
  queues_.copy(to, from.data(), from.size(), "writing");
}

}  // namespace stepgraph::cuda
