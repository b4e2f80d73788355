#include "engine/run/threads/affinity.hpp"

#include <algorithm>
#include <cerrno>

namespace stepgraph {

Affinity::Affinity(std::span<const int> processors) {
  const int last = processors.empty() ? 0 : *std::max_element(processors.begin(), processors.end());
  sets_.resize(static_cast<std::size_t>(last) / CPU_SETSIZE + 1);
  const std::size_t size = sets_.size() * sizeof(cpu_set_t);
  CPU_ZERO_S(size, sets_.data());
  for (const int processor : processors) CPU_SET_S(static_cast<std::size_t>(processor), size, sets_.data());
}

// The kernel refuses a set that is smaller than its own, whose size it does not tell.
Affinity Affinity::of_thread(pid_t thread) {
  constexpr std::size_t most_sets = 64;
  Affinity found({});
  for (;;) {
    const std::size_t size = found.sets_.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(thread, size, found.sets_.data()) == 0 || errno != EINVAL) return found;
    if (found.sets_.size() >= most_sets) return found;
    found.sets_.resize(2 * found.sets_.size());
  }
}

bool Affinity::apply_to(pid_t thread) const noexcept {
  return sched_setaffinity(thread, sets_.size() * sizeof(cpu_set_t), sets_.data()) == 0;
}

std::vector<int> Affinity::processors() const {
  const std::size_t size = sets_.size() * sizeof(cpu_set_t);
  std::vector<int> found;
  for (std::size_t i = 0; i < sets_.size() * CPU_SETSIZE; ++i) {
    if (CPU_ISSET_S(i, size, sets_.data())) found.push_back(static_cast<int>(i));
  }
  return found;
}

}  // namespace stepgraph
