#include "backends/cuda/heap.hpp"

#include <cuda.h>
#include <unistd.h>

#include <algorithm>

#include "backends/cuda/check.hpp"
#include "backends/cuda/driver.hpp"
#include "backends/cuda/host_pages.hpp"
#include "engine/run/host_memory_error.hpp"

namespace stepgraph::cuda {
namespace {

bool has_context(int device) noexcept {
  static const auto state = driver_function<decltype(&cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState");
  unsigned flags          = 0;
  int active              = 0;
  return state != nullptr && state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

}  // namespace

OnDevice::OnDevice(int device) : device_(device) {
  check(cudaGetDevice(&before_), "asking for the current device");
  if (device_ != before_) check(cudaSetDevice(device_), [&] { return str("using device ", device_); });
}
OnDevice::~OnDevice() {
  if (device_ != before_ && has_context(before_)) static_cast<void>(cudaSetDevice(before_));
}

Heap::~Heap() {
  try {
    const OnDevice here(devices_.front());
    for (const auto& [bytes, pinned] : pinned_) {
      static_cast<void>(pinned.mapped ? cudaHostUnregister(bytes) : cudaFreeHost(bytes));
      if (pinned.mapped) unmap_pages(bytes, pinned.size);
    }
    for (const auto& [device, place] : places_) {
      static_cast<void>(cudaStreamSynchronize(place.stream));
      if (place.pool != nullptr) static_cast<void>(cudaMemPoolDestroy(place.pool));
      static_cast<void>(cudaStreamDestroy(place.stream));
    }
  } catch (const Error&) {  // the device has failed: nothing can be freed
  }
}

const Heap::Place& Heap::place_of(int device) {
  const std::lock_guard lock(mutex_);
  const auto found = places_.find(device);
  if (found != places_.end()) return found->second;
  const OnDevice here(device);
  Place place;
  check(cudaStreamCreateWithFlags(&place.stream, cudaStreamNonBlocking), "making a stream for copies");
  try {
    make_pool(device, place);
  } catch (...) {
    if (place.pool != nullptr) static_cast<void>(cudaMemPoolDestroy(place.pool));
    static_cast<void>(cudaStreamDestroy(place.stream));
    throw;
  }
  return places_.emplace(device, place).first->second;
}

void Heap::make_pool(int device, Place& place) const {
  int supported = 0;
  check(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device), "asking for memory pools");
  if (supported == 0) return;
  cudaMemPoolProps what{};
  what.allocType     = cudaMemAllocationTypePinned;
  what.location.type = cudaMemLocationTypeDevice;
  what.location.id   = device;
  check(cudaMemPoolCreate(&place.pool, &what), "making a memory pool");
  for (const int peer : devices_) {
    if (peer == device) continue;
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id   = peer;
    access.flags         = cudaMemAccessFlagsProtReadWrite;
    check(cudaMemPoolSetAccess(place.pool, &access, 1),
          [&] { return str("giving device ", peer, " access to the memory of device ", device); });
  }
}

cudaStream_t Heap::copy_stream(int device) { return place_of(device).stream; }

std::byte* Heap::allocate(int device, std::size_t size, const std::string& what) {
  const OnDevice here(device);
  const Place& place = place_of(device);
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "asking for free memory");
  void* bytes        = nullptr;
  cudaError_t status = cudaErrorMemoryAllocation;
  if (size <= total)
    status = place.pool == nullptr ? cudaMalloc(&bytes, size)
                                   : cudaMallocFromPoolAsync(&bytes, size, place.pool, place.stream);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw Error(ErrorKind::backend,
                str("cuda: ", what, " needs ", size, " bytes on device ", device, "; of its ", total, " bytes, ", free,
                    " are free (fewer ranks on it, or recompute, shard or a smaller batch.micro)"));
  }
  check(status, [&] { return str("allocating ", size, " bytes for ", what); });
  check(cudaStreamSynchronize(place.stream), [&] { return str("allocating ", size, " bytes for ", what); });
  return static_cast<std::byte*>(bytes);
}

void Heap::release(int device, std::byte* bytes) noexcept {
  if (abandoned_) return;
  try {
    const OnDevice here(device);
    const Place& place = place_of(device);
    if (place.pool == nullptr) {
      static_cast<void>(cudaFree(bytes));
      return;
    }
    static_cast<void>(cudaFreeAsync(bytes, place.stream));
    static_cast<void>(cudaStreamSynchronize(place.stream));
    static_cast<void>(cudaMemPoolTrimTo(place.pool, 0));
  } catch (const Error&) {  // the device has failed: nothing can be freed
  }
}

// cudaHostAlloc makes and pins small pages on one thread, which takes half a minute for 100 GB.
std::byte* Heap::pin_pages(std::size_t size) {
  constexpr std::size_t worth_it = std::size_t{64} << 20;
  if (size < worth_it) return nullptr;
  for (const int device : devices_) {
    int same_address = 0;
    check(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device),
          "asking for the addresses of pinned memory");
    if (same_address == 0) return nullptr;
  }
  const std::size_t whole = (size + page_size - 1) / page_size * page_size;
  std::byte* const pages  = map_pages(whole);
  if (pages == nullptr) return nullptr;
  if (cudaHostRegister(pages, whole, cudaHostRegisterPortable | cudaHostRegisterMapped) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    unmap_pages(pages, whole);
    return nullptr;
  }
  pinned_.emplace(pages, Pinned{.size = whole, .mapped = true});
  return pages;
}

Heap::Taken Heap::take_pinned(std::size_t size, const std::string& what) {
  const std::lock_guard lock(mutex_);
  // A much larger block stays for what needs it.
  if (const auto fits = unused_.lower_bound(size); fits != unused_.end() && fits->first / 2 <= size) {
    std::byte* const bytes = fits->second;
    unused_.erase(fits);
    return {.bytes = bytes};
  }
  const OnDevice here(devices_.front());
  if (std::byte* const pages = pin_pages(size)) return {.bytes = pages, .zeroed = true};
  void* bytes              = nullptr;
  const cudaError_t status = cudaHostAlloc(&bytes, size, cudaHostAllocPortable);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    const long page = sysconf(_SC_PAGESIZE);
    throw HostMemoryError(str("cuda: ", what, " needs ", size, " bytes of pinned host memory; of ",
                              sysconf(_SC_PHYS_PAGES) * page, " bytes, ", sysconf(_SC_AVPHYS_PAGES) * page,
                              " are free (fewer ranks in this process, or less offloading)"));
  }
  check(status, [&] { return str("pinning ", size, " bytes for ", what); });
  pinned_.emplace(static_cast<std::byte*>(bytes), Pinned{.size = size});
  return {.bytes = static_cast<std::byte*>(bytes)};
}

std::byte* Heap::pin_zeroed(std::size_t size, const std::string& what) {
  const Taken taken = take_pinned(size, what);
  if (!taken.zeroed) clear_pages(taken.bytes, size);
  return taken.bytes;
}

void Heap::unpin(std::byte* bytes) noexcept {
  if (abandoned_) return;
  const std::lock_guard lock(mutex_);
  unused_.emplace(pinned_.at(bytes).size, bytes);
}

}  // namespace stepgraph::cuda
