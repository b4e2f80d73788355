#pragma once
#include "tools/stepgraph/command_line.hpp"

// The benchmarks of `stepgraph bench` that run training steps of the models that they name.
namespace stepgraph::cli {

void add_bench_capture(Command bench);
void add_bench_checkpoint(Command bench);
void add_bench_train(Command bench);
void add_bench_predict(Command bench);
void add_bench_pipeline(Command bench);

}  // namespace stepgraph::cli
