#pragma once
#include <string>

#include "tests/support/processes/process.hpp"

// Commands over processes: with mpirun for MPI, with `stepgraph launch` for Gloo and NCCL.
namespace stepgraph::testing {

// Skips the test if the backend is not in this build or cannot run here. Sanitized builds run MPI in
// tests/backends/process_worlds_test.cpp only.
void require_backend(const std::string& backend);

// `stepgraph COMMAND --set backend=BACKEND` in `size` processes. It ends after `limit_s` (more if it is sanitized),
// which a test that passes does not need.
[[nodiscard]] Outcome run_over(const std::string& backend, int size, const std::string& command, int limit_s = 40);

// The JSON lines of a command without values that depend on time or on the backend. Memory is left out too: the order
// along which it is planned comes from a simulation, of all ranks or of those of one process.
[[nodiscard]] std::string without_times(const std::string& out);

}  // namespace stepgraph::testing
