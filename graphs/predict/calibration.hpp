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

// How fast a computer runs the ops of training steps, measured once and kept in a file: enough to say how long a step
// takes before it runs.
//
//   const Calibration here = calibrate([](int ranks) { return std::make_unique<LoopbackWorld>(ranks); });
//   save_calibration(here, calibration_path(here.threads));
//   const Timeline step = simulate(runnable, calibrated_machine(here, graph.num_ranks()));
struct Calibration {
  std::string host                                  = {};  // where it was measured
  int cores                                         = 1;   // that it has
  int threads                                       = 1;   // of the executor
  double node_overhead_s                            = 0;   // between the end of a node and the begin of the next
  std::map<std::string, std::vector<RatePoint>> ops = {};
  friend bool operator==(const Calibration&, const Calibration&) = default;
};

// Makes a world of so many ranks, all in this process.
using MakeWorld = std::function<std::unique_ptr<World>(int num_ranks)>;

struct CalibrateOptions {
  int threads = 0;      // 0: as many as the machine has cores
  int steps   = 3;      // of each model and layout, after one that is not counted
  bool small  = false;  // tiny models only: to try it out, no good for predictions
};
// Trains models of one layer, of several sizes and families, and looks at what each of their nodes takes: beside nodes
// of other ranks, and alone. Takes some seconds on a machine that should have nothing else to do.
[[nodiscard]] Calibration calibrate(const MakeWorld& make_world, const CalibrateOptions& options = {});

// The machine that was measured, with that many ranks on it. Ops that were not measured take what the fastest product
// and the middle one of all streaming ops would.
[[nodiscard]] Machine calibrated_machine(const Calibration& calibration, int num_ranks);

// Files: JSON. What does not hold a calibration is refused with an Error(config) that names the file.
[[nodiscard]] std::string to_json(const Calibration& calibration);
[[nodiscard]] Calibration parse_calibration(std::string_view text);
void save_calibration(const Calibration& calibration, const std::filesystem::path& path);  // makes its folder
[[nodiscard]] Calibration load_calibration(const std::filesystem::path& path);

// Where this computer's is kept: in $XDG_CACHE_HOME/stepgraph or ~/.cache/stepgraph, by host, cores and threads.
// Throws Error(config) where there is no home.
[[nodiscard]] std::filesystem::path calibration_path(int threads);
[[nodiscard]] std::string host_name();
[[nodiscard]] int num_cores();

}  // namespace stepgraph
