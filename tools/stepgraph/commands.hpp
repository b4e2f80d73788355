#pragma once
#include "tools/stepgraph/command_line.hpp"

// Each function adds a subcommand to the program. Running a subcommand throws stepgraph::Error.
namespace stepgraph::cli {

void add_bench(Command program);
void add_eval(Command program);
void add_export(Command program);
void add_flight(Command program);
void add_generate(Command program);
void add_graph(Command program);
void add_inspect(Command program);
void add_launch(Command program);
void add_plan_memory(Command program);
void add_schedule(Command program);
void add_simulate(Command program);
void add_train(Command program);
void add_verify(Command program);

}  // namespace stepgraph::cli
