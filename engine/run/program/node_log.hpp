#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

// What one thread of a pool has done, for a RunView: internal to engine/.
namespace stepgraph {

// The nodes that a thread has ended last. Its own thread adds; any thread reads.
class NodeLog {
 public:
  struct Entry {
    std::uint32_t node;
    std::uint64_t ticks;
  };

  void add(std::uint32_t node, std::uint64_t ticks) noexcept {
    const std::uint64_t number = written_.load(std::memory_order_relaxed);
    Slot& slot                 = slots_[number % size];
    // Release: a reader that sees one of these values also sees the `written_` before it, so it leaves the slot out.
    slot.node.store(node, std::memory_order_release);
    slot.ticks.store(ticks, std::memory_order_release);
    written_.store(number + 1, std::memory_order_release);
  }
  void clear() noexcept { first_.store(written_.load(std::memory_order_relaxed), std::memory_order_relaxed); }

  // The oldest first. The slot that is written next is left out, and so are those that were written meanwhile.
  [[nodiscard]] std::vector<Entry> entries() const {
    const std::uint64_t end   = written_.load(std::memory_order_acquire);
    const std::uint64_t least = end < size ? 0 : end - size + 1;
    const std::uint64_t begin = std::max(least, first_.load(std::memory_order_relaxed));
    std::vector<Entry> found;
    for (std::uint64_t i = begin; i < end; ++i) {
      // Acquire: `written_` is read again after them. (ThreadSanitizer does not know fences.)
      const Slot& slot = slots_[i % size];
      found.push_back({slot.node.load(std::memory_order_acquire), slot.ticks.load(std::memory_order_acquire)});
    }
    const std::uint64_t now  = written_.load(std::memory_order_relaxed);
    const std::uint64_t lost = now < size || now - size + 1 <= begin ? 0 : now - size + 1 - begin;
    const auto num_lost      = static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(lost, found.size()));
    found.erase(found.begin(), found.begin() + num_lost);
    return found;
  }

 private:
  static constexpr std::size_t size = 256;
  struct Slot {
    std::atomic<std::uint32_t> node{0};
    std::atomic<std::uint64_t> ticks{0};
  };
  std::array<Slot, size> slots_{};
  std::atomic<std::uint64_t> written_{0}, first_{0};
};

}  // namespace stepgraph
