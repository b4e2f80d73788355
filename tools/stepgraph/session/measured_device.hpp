#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "engine/simulate/machine.hpp"
#include "graphs/config/config.hpp"
#include "graphs/step/offload/homes.hpp"
#include "graphs/step/step_graph.hpp"

// The measured speed of the devices of a config's backend.
namespace stepgraph::cli {

struct MeasuredDevice {
  std::string device;  // "NVIDIA H200"
  Machine machine;
  OffloadRates rates;
  std::int64_t device_bytes = 0;  // its memory; 0: not known
};

[[nodiscard]] bool has_devices(const Config& config);  // backend cuda or nccl

// That of comm.machine, if this is the calibration of a device. Else that of this machine's device, if it was measured
// by this program (`simulate --calibrate`) and the backend is cuda: the processes of a job must not choose by files
// that may differ. A file that cannot be used is named on stderr.
[[nodiscard]] std::optional<MeasuredDevice> measured_device(const Config& config);

// StepOptions::offload_rates: the measured ones, or usual ones. None: the backend has no devices.
[[nodiscard]] std::optional<OffloadRates> offload_rates_of(const Config& config,
                                                           const std::optional<MeasuredDevice>& device);
// StepOptions::simulator
[[nodiscard]] inline const Machine* simulator_of(const std::optional<MeasuredDevice>& device) {
  return device ? &device->machine : nullptr;
}
// StepOptions::device_memory_bytes, for commands without a world
[[nodiscard]] inline std::int64_t memory_of(const std::optional<MeasuredDevice>& device) {
  return device ? device->device_bytes : 0;
}

// How commands without a world build a step: as `train` would on the config's backend.
[[nodiscard]] StepOptions building_options(const Config& config, const std::optional<Machine>& chooser,
                                           const std::optional<MeasuredDevice>& device);

// Measurements with older kernels are not valid for this program.
[[nodiscard]] bool older_than_this_program(const std::filesystem::path& path);

}  // namespace stepgraph::cli
