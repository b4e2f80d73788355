#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "engine/base/types.hpp"
#include "engine/simulate/machine.hpp"
#include "graphs/step/step_graph.hpp"

namespace stepgraph {

// A cluster that is described, not measured: nodes of equal devices. With it the time of a step can be predicted on
// machines that do not exist here.
struct Cluster {
  std::string name     = "cluster";  // for people: of the preset
  int nodes            = 1;
  int devices_per_node = 1;
  Link inside          = {};  // the port of a device, each way
  Link between         = {};  // all network cards of a node together, each way; a device alone can use all of them
  std::map<DType, double> flops_per_s = {};         // of matrix products, by type: the peak
  double efficiency                   = 1;          // the share of it that products reach
  double memory_bytes_per_s           = unlimited;  // of a device
  std::int64_t memory_bytes           = 0;          // of a device; 0: not known
  double overhead_s                   = 0;          // between the nodes of a lane, such as the launch of a kernel

  // For steps with offload. Unlimited: not known, and such a step is refused.
  double h2d_bytes_per_s         = unlimited;  // from the memory of the host to that of a device ...
  double d2h_bytes_per_s         = unlimited;  // ... and back
  double host_memory_bytes_per_s = unlimited;  // of the host of a node: its devices' host nodes share it
  double disk_read_bytes_per_s   = unlimited;  // for each device ...
  double disk_write_bytes_per_s  = unlimited;  // ... and the other way

  std::map<int, double> slow = {};  // by device: it takes so many times as long to compute
  double slow_in_turns       = 1;   // likewise, in step s the device s modulo the number of ranks

  [[nodiscard]] int num_devices() const noexcept { return nodes * devices_per_node; }
  friend bool operator==(const Cluster&, const Cluster&) = default;
};

// One node of 8 devices with published figures: "a100", "h100" or "h200". graphs/predict/README.md has the sources.
// Throws Error(config) for another name.
[[nodiscard]] Cluster cluster_preset(std::string_view name);

// Files are JSON: see graphs/predict/README.md. Throws Error(config) for unknown keys, wrong values and missing ones.
[[nodiscard]] Cluster parse_cluster(std::string_view text);
[[nodiscard]] Cluster load_cluster(const std::filesystem::path& path);  // its errors name the file

// The first `num_ranks` devices of the cluster, for steps that compute in `type`. A node of the graph takes the time of
// its flops at efficiency * flops_per_s, or of its bytes at the memory's bandwidth, which the lanes of a device share;
// the longer of the two. Throws Error(config) if the cluster has fewer devices, no rate for the type, or a slow device
// that no rank has. Copies between host and device take their bytes at the link's rate, host nodes such as updates at
// the bandwidth of the host's memory.
[[nodiscard]] Machine cluster_machine(const Cluster& cluster, int num_ranks, DType type);

// How fast copies and updates are while all devices of a node offload: for StepOptions::offload_rates. An update on the
// host moves 30 bytes for each element.
[[nodiscard]] OffloadRates offload_rates(const Cluster& cluster);

// Throws Error(config) if the step has transfers for which the cluster has no rate.
void check_offload_rates(const Cluster& cluster, const StepGraph& step);

}  // namespace stepgraph
