#pragma once
#include <string>
#include <vector>

namespace stepgraph::bench {

struct PipelineOptions {
  std::string model                  = "S";
  std::vector<std::string> schedules = {"1f1b", "zb-h1", "zb-v", "v-half", "v-min", "dualpipe-v"};
  int stages                         = 2;  // pipeline ranks
  int microbatches                   = 8;
  int steps                          = 5;
  int threads                        = 2;
  bool dry_run                       = false;
  bool json                          = false;
};

// Trains with each schedule and prints the bubble rate of the run, and the rate that the simulation of the schedule
// gives with the measured times of the stages. Medians over steps. The two compare where each rank has a thread.
void pipeline(const PipelineOptions& options);

}  // namespace stepgraph::bench
