#pragma once
#include <sched.h>
#include <sys/types.h>

#include <span>
#include <vector>

namespace stepgraph {

// The processors on which a thread may run: internal to engine/.
class Affinity {
 public:
  explicit Affinity(std::span<const int> processors);
  [[nodiscard]] static Affinity of_thread(pid_t thread);  // 0: of this thread

  // Moves a thread to these processors; 0: this thread. False: the system refuses, as when the process may not use them
  // any more. The thread then runs where it did.
  bool apply_to(pid_t thread) const noexcept;
  [[nodiscard]] std::vector<int> processors() const;  // ascending

 private:
  std::vector<cpu_set_t> sets_;  // together one set of the kernel, which has any size
};

}  // namespace stepgraph
