#include "tools/stepgraph/session/measured_device.hpp"

#include <iostream>
#include <variant>

#include "engine/base/error.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/predict/machine_file.hpp"
#include "tools/stepgraph/processes/worlds.hpp"
#include "tools/stepgraph/session/session.hpp"

namespace stepgraph::cli {
namespace {

// The calibration of this machine's device in the cache folder, if it can be used.
std::optional<Calibration> kept_calibration(const Config& config) {
  std::string device;
  try {
    device = device_name(config.devices.value_or(std::vector<int>{0}));
  } catch (const Error&) {  // this machine has none, so none was measured here
    return std::nullopt;
  }
  const auto leave = [](std::string_view why) {
    std::cerr << "offload: usual rates are used: " << why << " (simulate --calibrate measures the device)\n";
    return std::nullopt;
  };
  const int threads = config.threads > 0 ? config.threads : num_cores();
  try {
    const std::filesystem::path path = calibration_path(threads, device);
    std::error_code error;
    if (!std::filesystem::exists(path, error)) return std::nullopt;
    if (older_than_this_program(path)) return leave(str(path.string(), ": is older than this program"));
    Calibration found = load_calibration(path);
    if (found.host != host_name() || found.device != device || found.threads != threads)
      return leave(str(path.string(), ": was measured on '", found.host, "' with ", found.threads, " threads"));
    return found;
  } catch (const Error& error) {
    return leave(error.what());
  }
}

std::optional<Calibration> calibration_of(const Config& config) {
  if (!config.machine.empty()) {
    const MachineFile file        = load_machine_file(config.machine);
    const auto* const calibration = std::get_if<Calibration>(&file);
    if (calibration != nullptr && !calibration->device.empty()) return *calibration;
  }
  if (config.backend != "cuda") return std::nullopt;
  return kept_calibration(config);
}

}  // namespace

bool has_devices(const Config& config) { return config.backend == "cuda" || config.backend == "nccl"; }

bool older_than_this_program(const std::filesystem::path& path) {
  std::error_code error;
  const auto program = std::filesystem::last_write_time("/proc/self/exe", error);
  if (error) return false;
  const auto file = std::filesystem::last_write_time(path, error);
  return !error && file < program;
}

std::optional<MeasuredDevice> measured_device(const Config& config) {
  const Plan& plan = config.plan;
  if (!has_devices(config) || !(plan.offload.moves_something() || plan.recompute == Recompute::automatic))
    return std::nullopt;
  const std::optional<Calibration> found = calibration_of(config);
  if (!found) return std::nullopt;
  return MeasuredDevice{.device  = found->device,
                        .machine = calibrated_machine(*found, Layout(plan.layout).num_ranks(), plan.precision.param),
                        .rates   = offload_rates(*found),
                        .device_bytes = found->device_bytes};
}

std::optional<OffloadRates> offload_rates_of(const Config& config, const std::optional<MeasuredDevice>& device) {
  if (!has_devices(config)) return std::nullopt;
  return device ? device->rates : usual_offload_rates;
}

StepOptions building_options(const Config& config, const std::optional<Machine>& chooser,
                             const std::optional<MeasuredDevice>& device) {
  return {.join_tied_first     = joins_tied_first(config),
          .machine             = pointer_to(chooser),
          .simulator           = simulator_of(device),
          .issue_order         = issue_order_of(config),
          .workspaces          = workspaces_of(config),
          .offload_rates       = offload_rates_of(config, device),
          .device_memory_bytes = memory_of(device),
          .window              = shown_window(config)};
}

}  // namespace stepgraph::cli
