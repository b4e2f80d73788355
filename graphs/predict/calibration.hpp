#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/types.hpp"
#include "engine/run/storage.hpp"
#include "engine/run/world.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/simulate/rate_table.hpp"
#include "graphs/step/offload/homes.hpp"

namespace stepgraph {

// The speed of a computer on the ops of training steps, measured once and kept in a file. With it the time of a step
// can be predicted.
//
//   const Calibration here = calibrate([](int ranks) { return std::make_unique<LoopbackWorld>(ranks); });
//   save_calibration(here, calibration_path(here.threads));
//   const Timeline step = simulate(runnable, calibrated_machine(here, graph.num_ranks()));
struct Calibration {
  using Ops = std::map<std::string, std::vector<RatePoint>>;
  // Nodes on a lane take `factor` times as long while all lanes in `others` have nodes: Machine::beside.
  struct Beside {
    LaneKind lane                                        = LaneKind::h2d;
    std::vector<LaneKind> others                         = {};
    double factor                                        = 1;
    friend bool operator==(const Beside&, const Beside&) = default;
  };

  std::string host          = {};  // where it was measured
  std::int64_t host_bytes   = 0;   // of the host's memory; 0: not known
  std::string device        = {};  // "NVIDIA H200": ranks compute on such devices. Empty: on the processor of the host
  std::int64_t device_bytes = 0;   // of the device's memory; 0: not known
  std::string disk          = {};  // the folder in which disk_read and disk_write were measured; empty: they were not
  int cores                 = 1;   // of the host
  int threads               = 1;   // of the executor
  double node_overhead_s    = 0;   // between the end of a node and the start of the next
  // Of steps in fp32 and in bf16. Steps in fp16 have the times of bf16 on a device, those of fp32 on a processor. With
  // a device, host nodes have names of their own: "adamw@host".
  Ops ops                                                        = {};
  Ops ops_bf16                                                   = {};
  std::vector<Beside> beside                                     = {};
  friend bool operator==(const Calibration&, const Calibration&) = default;
};

// Makes a world with this number of ranks, all in this process.
using MakeWorld = std::function<std::unique_ptr<World>(int num_ranks)>;

struct CalibrateOptions {
  int threads = 0;      // 0: as many as the machine has cores
  int steps   = 3;      // of each model and layout, after a warm-up step
  bool small  = false;  // tiny models only: quick, but not good for predictions
  // The name of the device that the ranks of the world are on; empty: there is none. With a device, copies between its
  // memory and the host's and updates on the host are measured too, alone and beside each other.
  std::string device = {};
  // Without a device: OffloadPlan::disk, and storage in that folder. Steps with offload to it are measured too. Empty:
  // none are.
  std::string disk                             = {};
  MakeStorage storage                          = {};
  std::function<void(const std::string&)> tell = {};  // what is measured and found, a line each; empty: nobody
};
// Trains models of few layers, of several sizes and families, and measures each of their nodes, beside nodes of other
// ranks and alone. Takes less than a minute. The machine should be idle.
[[nodiscard]] Calibration calibrate(const MakeWorld& make_world, const CalibrateOptions& options = {});

// The measured machine with this number of ranks, for steps with weights of type `param`. Ops that were not measured
// have the rate of the fastest matrix product and the median rate of all streaming ops. With a device, each rank has
// one: it runs one node at a time, beside copies, communications and host nodes. Copies and host nodes slow each other
// down as measured.
[[nodiscard]] Machine calibrated_machine(const Calibration& calibration, int num_ranks, DType param = DType::f32);
// The measured ops of steps with weights of this type. Those that were measured in fp32 only have these times.
[[nodiscard]] Calibration::Ops ops_of(const Calibration& calibration, DType param);
// The name that a node of a graph has in ops_of.
[[nodiscard]] std::string op_name(const Calibration& calibration, const Graph& graph, Node node);
// How fast copies and updates are while all of them run at once: for StepOptions::offload_rates. Rates that were not
// measured are those of usual_offload_rates.
[[nodiscard]] OffloadRates offload_rates(const Calibration& calibration);

// Files are JSON. A file without a calibration throws Error(config), which names the file.
[[nodiscard]] std::string to_json(const Calibration& calibration);
[[nodiscard]] Calibration parse_calibration(std::string_view text);
void save_calibration(const Calibration& calibration, const std::filesystem::path& path);  // makes the folder
[[nodiscard]] Calibration load_calibration(const std::filesystem::path& path);

// The file for this computer: in $XDG_CACHE_HOME/stepgraph or ~/.cache/stepgraph, named by host, cores, threads and
// device. Throws Error(config) where there is no home folder.
[[nodiscard]] std::filesystem::path calibration_path(int threads, const std::string& device = {});
[[nodiscard]] std::string host_name();
[[nodiscard]] int num_cores();

}  // namespace stepgraph
