#pragma once
#include <string>

namespace stepgraph::testing {

struct Outcome {
  int exit_code = -1;  // -1: ended by a signal
  std::string out, err;
};

// Runs a shell command and waits for it.
[[nodiscard]] Outcome run_command(const std::string& command);

}  // namespace stepgraph::testing
