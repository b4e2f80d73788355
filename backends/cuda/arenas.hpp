#pragma once
#include <cstdint>
#include <map>
#include <mutex>

#include "backends/cuda/queues.hpp"
#include "engine/run/device.hpp"

namespace stepgraph::cuda {

// Device arenas, and pinned arenas that the host can access too: pageable memory, where it is not to be pinned.
class Arenas final : public DeviceMemory {
 public:
  Arenas(Queues& queues, bool pinned) : queues_(queues), pinned_(pinned) {}

  [[nodiscard]] std::byte* allocate(Rank rank, Space space, std::size_t size) override;
  void release(Rank rank, Space space, std::byte* bytes) noexcept override;
  [[nodiscard]] bool host_sees(Space space) const noexcept override { return space == Space::pinned; }
  [[nodiscard]] std::int64_t size_bytes(Rank rank) const override;
  void read(const std::byte* from, std::span<std::byte> to) override;
  void write(std::byte* to, std::span<const std::byte> from) override;

 private:
  Queues& queues_;
  bool pinned_;
};

}  // namespace stepgraph::cuda
