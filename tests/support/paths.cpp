#include "tests/support/paths.hpp"

namespace stepgraph::testing {

std::string command_path() { return STEPGRAPH_COMMAND; }

std::string planted_race_path() { return STEPGRAPH_PLANTED_RACE; }

std::string command_sequence_path() { return STEPGRAPH_COMMAND_SEQUENCE; }

std::string world_process_path() { return STEPGRAPH_WORLD_PROCESS; }
std::string source_path() { return STEPGRAPH_SOURCE_DIR; }

}  // namespace stepgraph::testing
