#pragma once
#include <string>

// Paths of this build's programs and data. Only paths.cpp has them compiled in, so every other test compiles to the
// same bytes in every build folder, and a compiler cache compiles it once.
namespace stepgraph::testing {

[[nodiscard]] std::string command_path();           // the stepgraph command of this build
[[nodiscard]] std::string planted_race_path();      // tests/support/planted_race_main.cc of this build
[[nodiscard]] std::string command_sequence_path();  // tests/support/command_sequence_main.cc, in the asan build
[[nodiscard]] std::string world_process_path();     // tests/support/world_process_main.cc of this build
[[nodiscard]] std::string source_path();            // the folder of the sources

}  // namespace stepgraph::testing
