#include "backends/cuda/arenas.hpp"

#include <unistd.h>

#include <algorithm>

#include "backends/cuda/check.hpp"

namespace stepgraph::cuda {
namespace {

std::byte* pin(Rank rank, std::size_t size) {
  void* bytes              = nullptr;
  const cudaError_t status = cudaHostAlloc(&bytes, size, cudaHostAllocDefault);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    const long page = sysconf(_SC_PAGESIZE);
    throw Error(ErrorKind::backend,
                str("cuda: the planned arena of rank ", rank, " needs ", size, " bytes of pinned host memory; of ",
                    sysconf(_SC_PHYS_PAGES) * page, " bytes, ", sysconf(_SC_AVPHYS_PAGES) * page,
                    " are free (fewer ranks in this process, or less offloading)"));
  }
  check(status, [&] { return str("pinning ", size, " bytes for rank ", rank); });
  std::fill_n(static_cast<std::byte*>(bytes), size, std::byte{0});
  return static_cast<std::byte*>(bytes);
}

}  // namespace

std::byte* Arenas::allocate(Rank rank, Space space, std::size_t size) {
  queues_.check_usable();
  const OnDevice here(queues_.device_of(rank));
  if (space == Space::pinned) return pin(rank, size);
  std::byte* const bytes = allocate_on(queues_.device_of(rank), size, str("the planned arena of rank ", rank));
  check(cudaMemset(bytes, 0, size), "clearing an arena");
  check(cudaDeviceSynchronize(), "clearing an arena");
  return bytes;
}

void Arenas::release(Rank rank, Space space, std::byte* bytes) noexcept {
  if (queues_.abandoned()) return;  // freeing waits for the device, which may still use them
  int before = 0;
  static_cast<void>(cudaGetDevice(&before));
  static_cast<void>(cudaSetDevice(queues_.device_of(rank)));
  static_cast<void>(cudaDeviceSynchronize());
  static_cast<void>(space == Space::pinned ? cudaFreeHost(bytes) : cudaFree(bytes));
  static_cast<void>(cudaSetDevice(before));
}

void Arenas::read(const std::byte* from, std::span<std::byte> to) {
  queues_.synchronize();
  check(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDefault),
        [&] { return str("reading ", to.size(), " bytes"); });
}

void Arenas::write(std::byte* to, std::span<const std::byte> from) {
  queues_.synchronize();
  check(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyDefault),
        [&] { return str("writing ", from.size(), " bytes"); });
  check(cudaDeviceSynchronize(), [&] { return str("writing ", from.size(), " bytes"); });
}

}  // namespace stepgraph::cuda
