#pragma once
#include <string>

// Paths of this build's programs and data. Only paths.cpp has them compiled in, so every other test compiles to the
// same bytes in every build folder, and a compiler cache compiles it once.
namespace stepgraph::testing {

[[nodiscard]] std::string command_path();  // the stepgraph command of this build
// The programs of tests/support/processes/*_main.cc. The second one is in the asan build only.
[[nodiscard]] std::string planted_race_path();
[[nodiscard]] std::string command_sequence_path();
[[nodiscard]] std::string world_process_path();
[[nodiscard]] std::string source_path();  // the folder of the sources

}  // namespace stepgraph::testing
