#pragma once
#include <optional>
#include <string>

#include "backends/process/environment.hpp"
#include "engine/base/partial.hpp"

namespace stepgraph {

// The processes of a job on this machine, before they have any connection: in MPI_Init a process cannot know which
// other one has died. Each process listens at a name in the system's abstract namespace, which ends with the process.
// So another one can ask whether it is there. Nothing is sent.
class Siblings {
 public:
  // `job`: a name that the processes of this job share and no other job has.
  Siblings(std::string job, int rank, int size);
  // From the variables of mpirun. None: they are not set, or the job has processes on other machines.
  [[nodiscard]] static std::optional<Siblings> of_mpirun(const Environment& environment);

  // "rank 2 is gone", or "rank 2 is stopped" (by SIGSTOP): all such ranks. Empty: none.
  [[nodiscard]] std::string missing() const;

 private:
  std::string job_;
  int rank_, size_;
  Descriptor listener_;
};

}  // namespace stepgraph
