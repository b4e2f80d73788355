#include "backends/cuda/arenas.hpp"

#include <algorithm>

#include "backends/cuda/check.hpp"

namespace stepgraph::cuda {

std::byte* Arenas::allocate(Rank rank, Space space, std::size_t size) {
  const OnDevice here(queues_.device_of(rank));
  void* bytes = nullptr;
  if (space == Space::pinned) {
    check(cudaHostAlloc(&bytes, size, cudaHostAllocDefault), str("pinning ", size, " bytes for rank ", rank));
    std::fill_n(static_cast<std::byte*>(bytes), size, std::byte{0});
    return static_cast<std::byte*>(bytes);
  }
  const cudaError_t status = cudaMalloc(&bytes, size);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "asking for free memory");
    throw Error(ErrorKind::backend, str("cuda: rank ", rank, " is planned to need ", size, " bytes on device ",
                                        queues_.device_of(rank), ", of whose ", total, " bytes ", free,
                                        " are free (fewer ranks on it, or recompute, shard or a "
                                        "smaller batch.micro)"));
  }
  check(status, str("allocating ", size, " bytes for rank ", rank));
  check(cudaMemset(bytes, 0, size), "clearing an arena");
  check(cudaDeviceSynchronize(), "clearing an arena");
  return static_cast<std::byte*>(bytes);
}

void Arenas::release(Rank rank, Space space, std::byte* bytes) noexcept {
  int before = 0;
  static_cast<void>(cudaGetDevice(&before));
  static_cast<void>(cudaSetDevice(queues_.device_of(rank)));
  static_cast<void>(cudaDeviceSynchronize());
  static_cast<void>(space == Space::pinned ? cudaFreeHost(bytes) : cudaFree(bytes));
  static_cast<void>(cudaSetDevice(before));
}

void Arenas::read(const std::byte* from, std::span<std::byte> to) {
  queues_.synchronize();
  check(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDefault), str("reading ", to.size(), " bytes"));
}

void Arenas::write(std::byte* to, std::span<const std::byte> from) {
  queues_.synchronize();
  check(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyDefault), str("writing ", from.size(), " bytes"));
  check(cudaDeviceSynchronize(), str("writing ", from.size(), " bytes"));
}

}  // namespace stepgraph::cuda
