#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "backends/nccl/make_world.hpp"
#include "backends/process/environment.hpp"
#include "backends/process/world.hpp"

namespace stepgraph {

struct InitOptions {
  PlaceOverrides place      = {};  // replaces what the environment says
  ProcessWorldOptions world = {};
  NcclChoice nccl           = {};
  // What may keep the set-up from ending, for its message: "rank 2 is stopped". Empty: not known.
  std::function<std::string()> explain_set_up = {};
};

// The world of this process, which is one of several: "gloo", "mpi" or "nccl". Collective: it returns when all
// processes have called it. Rank, size and address come from the environment that mpirun, torchrun, srun or `stepgraph
// launch` have made (backends/process/environment.hpp).
//
// Throws within the time-out, in every process: Error(config) for a missing or contradicting variable, a taken port, or
// processes of different size or version; Error(backend) for an address without an answer, or a backend that this
// build does not have. SIGPIPE is ignored from now on.
[[nodiscard]] std::unique_ptr<ProcessWorld> init_world(std::string_view backend, const InitOptions& options = {});

// The same with a given place. `address` is HOST:PORT of process 0. Not for MPI under mpirun, which knows the place.
[[nodiscard]] std::unique_ptr<ProcessWorld> init_world(std::string_view backend, int rank, int size,
                                                       std::string_view address, InitOptions options = {});

// Whether this build has the backend.
[[nodiscard]] bool has_process_backend(std::string_view backend) noexcept;

}  // namespace stepgraph
