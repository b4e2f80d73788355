#include "backends/cuda/arenas.hpp"

#include <algorithm>

#include "engine/base/error.hpp"

namespace stepgraph::cuda {

std::byte* Arenas::allocate(Rank rank, Space space, std::size_t size) {
  queues_.check_usable();
  const std::string what = str("the planned arena of rank ", rank);
  if (space == Space::pinned) {
    std::byte* const bytes = queues_.heap().pin(size, what);
    std::fill_n(bytes, size, std::byte{0});
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
  space == Space::pinned ? queues_.heap().unpin(bytes) : queues_.heap().release(queues_.device_of(rank), bytes);
}

void Arenas::read(const std::byte* from, std::span<std::byte> to) {
  queues_.copy(to.data(), from, to.size(), "reading");
}

void Arenas::write(std::byte* to, std::span<const std::byte> from) {
  queues_.copy(to, from.data(), from.size(), "writing");
}

}  // namespace stepgraph::cuda
