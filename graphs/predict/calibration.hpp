#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/run/world.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/simulate/rate_table.hpp"

namespace stepgraph {

// The speed of a computer on the ops of training steps, measured once and kept in a file. With it the time of a step
// can be predicted.
//
//   const Calibration here = calibrate([](int ranks) { return std::make_unique<LoopbackWorld>(ranks); });
//   save_calibration(here, calibration_path(here.threads));
//   const Timeline step = simulate(runnable, calibrated_machine(here, graph.num_ranks()));
struct Calibration {
  std::string host                                  = {};  // where it was measured
  int cores                                         = 1;   // of the host
  int threads                                       = 1;   // of the executor
  double node_overhead_s                            = 0;   // between the end of a node and the start of the next
  std::map<std::string, std::vector<RatePoint>> ops = {};
  friend bool operator==(const Calibration&, const Calibration&) = default;
};

// Makes a world with this number of ranks, all in this process.
using MakeWorld = std::function<std::unique_ptr<World>(int num_ranks)>;

struct CalibrateOptions {
  int threads = 0;      // 0: as many as the machine has cores
  int steps   = 3;      // of each model and layout, after a warm-up step
  bool small  = false;  // tiny models only: quick, but not good for predictions
};
// Trains models of one layer, of several sizes and families, and measures each of their nodes, beside nodes of other
// ranks and alone. Takes some seconds. The machine should be idle.
[[nodiscard]] Calibration calibrate(const MakeWorld& make_world, const CalibrateOptions& options = {});

// The measured machine with this number of ranks. Ops that were not measured have the rate of the fastest matrix
// product and the median rate of all streaming ops.
[[nodiscard]] Machine calibrated_machine(const Calibration& calibration, int num_ranks);

// Files are JSON. A file without a calibration throws Error(config), which names the file.
[[nodiscard]] std::string to_json(const Calibration& calibration);
[[nodiscard]] Calibration parse_calibration(std::string_view text);
void save_calibration(const Calibration& calibration, const std::filesystem::path& path);  // makes the folder
[[nodiscard]] Calibration load_calibration(const std::filesystem::path& path);

// The file for this computer: in $XDG_CACHE_HOME/stepgraph or ~/.cache/stepgraph, named by host, cores and threads.
// Throws Error(config) where there is no home folder.
[[nodiscard]] std::filesystem::path calibration_path(int threads);
[[nodiscard]] std::string host_name();
[[nodiscard]] int num_cores();

}  // namespace stepgraph
