#pragma once
#include <string>
#include <vector>

namespace stepgraph::bench {

struct TrainOptions {
  std::vector<std::string> models  = {"S", "M"};
  std::vector<std::string> layouts = {"1x1x1", "2x1x1", "1x2x1", "1x1x2"};
  std::string shard                = "none";  // sharding strategy; unless none, compared with plain data parallelism
  std::string backend              = "loopback";
  std::vector<int> devices         = {0};    // of backend cuda and nccl; empty: all
  bool exact                       = false;  // of backend nccl: sums in rank order
  std::vector<int> split           = {};     // layers of each pipeline stage; empty: even
  // Instead of the usual figures: steps with each of these kinds of updates, where a rank is slow.
  std::vector<std::string> updates = {};
  double slow_factor               = 1;      // how many times as long its nodes take
  bool slow_in_turns               = false;  // another rank in each step; else rank 0
  int steps                        = 7;
  int warm_up                      = 2;  // steps before the measured ones
  int threads                      = 2;  // of all ranks together
  // Measured with each of these numbers of threads in turn, and the scaling is printed. Empty: with `threads`.
  std::vector<int> thread_counts = {};
  bool dry_run                   = false;
  bool json                      = false;
};

// Times training steps and the same work on one rank, step by step in turn, and the kernels of a step beside their
// floors: the best loop of multiply-adds and the best triad on the same threads. Prints on stdout.
void train(const TrainOptions& options);

}  // namespace stepgraph::bench
