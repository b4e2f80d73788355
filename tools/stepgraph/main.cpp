#include "tools/stepgraph/program.hpp"

int main(int argc, char** argv) { return stepgraph::cli::run_program(argc, argv); }
