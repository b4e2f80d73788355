#pragma once
#include <filesystem>
#include <variant>

#include "graphs/predict/calibration.hpp"
#include "graphs/predict/cluster.hpp"

namespace stepgraph {

// A machine of a file: measured (`simulate --calibrate` wrote it) or described.
using MachineFile = std::variant<Calibration, Cluster>;
[[nodiscard]] MachineFile load_machine_file(const std::filesystem::path& path);

// The machine with this number of ranks, for steps that compute in `type`.
[[nodiscard]] Machine machine_of(const MachineFile& file, int num_ranks, DType type);

}  // namespace stepgraph
