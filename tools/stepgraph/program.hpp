#pragma once

namespace stepgraph::cli {

// The command `stepgraph` with its arguments; argv[0] is the name of the program. Returns the exit code: 0 done, 1
// failed run or wrong result, 2 bad usage or config, 3 backend failure, 128 + N ended early by signal N. A process may
// run several commands, one after another.
int run_program(int argc, char** argv);

}  // namespace stepgraph::cli
