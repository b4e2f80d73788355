#pragma once
#include <CLI/CLI.hpp>

// Each adds a subcommand; its callback does the work and throws stepgraph::Error.
namespace stepgraph::cli {

void add_bench(CLI::App& app);
void add_eval(CLI::App& app);
void add_generate(CLI::App& app);
void add_graph(CLI::App& app);
void add_plan_memory(CLI::App& app);
void add_schedule(CLI::App& app);
void add_simulate(CLI::App& app);
void add_train(CLI::App& app);
void add_verify(CLI::App& app);

}  // namespace stepgraph::cli
