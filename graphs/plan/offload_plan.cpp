#include "graphs/plan/offload_plan.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

#include "engine/base/error.hpp"
#include "engine/base/size.hpp"

namespace stepgraph {
namespace {

[[noreturn]] void refuse_key(std::string_view key, const std::string& why) {
  throw Error(ErrorKind::config, str("offload.", key, ": ", why));
}

void check_budgets(const OffloadPlan& plan) {
  const auto at_least_zero = [](std::string_view key, std::int64_t bytes) {
    if (bytes < 0) refuse_key(key, str(bytes, " is negative (a number of bytes; 0: no limit)"));
  };
  at_least_zero("device_bytes", plan.device_bytes);
  at_least_zero("device_param_bytes", plan.device_param_bytes);
  at_least_zero("host_bytes", plan.host_bytes);
  at_least_zero("disk_bytes", plan.disk_bytes);
  if (plan.device_bytes > 0 && plan.device_param_bytes > plan.device_bytes) {
    refuse_key("device_param_bytes", str(plan.device_param_bytes, " is above offload.device_bytes ", plan.device_bytes,
                                         ", all memory of the device (at most ", plan.device_bytes, ")"));
  }
  if (!is_built(plan.compress))
    refuse_key("compress", str(to_string(plan.compress), " needs lz4, which this build does not have (another kind)"));
  if (plan.slots < 1) refuse_key("slots", str(plan.slots, " slots hold no unit (1 or more)"));
  if (plan.slots > most_offload_slots) refuse_key("slots", str(plan.slots, " slots (1 to ", most_offload_slots, ")"));
}

void check_disk(const OffloadPlan& plan) {
  if (plan.disk.empty()) {
    if (plan.disk_bytes > 0)
      refuse_key("disk_bytes", str(plan.disk_bytes, " has no effect without offload.disk (the name of a folder)"));
    return;
  }
  if (!may_use_disk(plan.strategy)) {
    refuse_key("disk", str("'", plan.disk, "' has no effect with strategy ", plan.strategy,
                           ", which does not use a disk (strategy manual or extreme)"));
  }
}

// Fields that are not the default although they have no effect.
void check_effects(const OffloadPlan& plan) {
  const OffloadPlan usual;
  const auto check = [](std::string_view key, bool given, bool idle, std::string_view because) {
    if (given && idle) refuse_key(key, str("has no effect ", because));
  };
  const bool idle = !plan.moves_something();
  const std::string_view nothing =
      "because nothing is offloaded (offload.params, grads, optimizer or activations true, or a strategy)";
  check("host_bytes", plan.host_bytes != usual.host_bytes, idle, nothing);
  check("disk", !plan.disk.empty(), idle, nothing);
  check("slots", plan.slots != usual.slots, idle, nothing);
  check("async", plan.async != usual.async, idle, nothing);
  check("pinned", plan.pinned != usual.pinned, idle, nothing);
  check("compress", plan.compress != usual.compress, idle, nothing);
  check("device_param_bytes", plan.device_param_bytes != usual.device_param_bytes, !plan.may_move(plan.params),
        "while all weights stay on the device (offload.params true)");
  check("overlap", plan.overlap != usual.overlap, !plan.optimizer,
        "without offload.optimizer true: the update then runs at the end of its own step (offload.optimizer true)");
}

}  // namespace

std::string_view to_string(OffloadStrategy strategy) noexcept {
  constexpr std::array<std::string_view, all_offload_strategies.size()> names{"manual", "conservative", "balanced",
                                                                              "aggressive", "extreme"};
  return names[static_cast<std::size_t>(strategy)];
}

double pressure_threshold(OffloadStrategy strategy) {
  switch (strategy) {
    case OffloadStrategy::manual:
      break;
    case OffloadStrategy::conservative:
      return 0.9;
    case OffloadStrategy::balanced:
      return 0.75;
    case OffloadStrategy::aggressive:
      return 0.6;
    case OffloadStrategy::extreme:
      return 0.4;
  }
  throw Error(ErrorKind::config, "offload.strategy: manual does not look at the pressure (any other strategy)");
}

double most_share(OffloadStrategy strategy) {
  switch (strategy) {
    case OffloadStrategy::conservative:
      return 0.2;
    case OffloadStrategy::balanced:
      return 0.5;
    case OffloadStrategy::aggressive:
      return 0.8;
    case OffloadStrategy::manual:
    case OffloadStrategy::extreme:
      break;
  }
  return 1;
}

bool may_use_disk(OffloadStrategy strategy) noexcept {
  return strategy == OffloadStrategy::manual || strategy == OffloadStrategy::extreme;
}

std::int64_t machine_memory_bytes() noexcept {
  const std::int64_t pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
  return pages > 0 && page_bytes > 0 ? pages * page_bytes : 0;
}

void check_disk_folder(const std::string& disk) {
  if (disk.empty()) return;
  std::error_code failed;
  const std::filesystem::file_status status = std::filesystem::status(disk, failed);
  if (status.type() == std::filesystem::file_type::not_found)
    refuse_key("disk", str("'", disk, "' does not exist (a folder that exists)"));
  if (!failed && !std::filesystem::is_directory(status))
    refuse_key("disk", str("'", disk, "' is a file (a folder that exists)"));
  if (failed || ::access(disk.c_str(), W_OK | X_OK) != 0)
    refuse_key("disk", str("'", disk, "' cannot be written to: ",
                           failed ? failed.message() : std::generic_category().message(errno),
                           " (a folder in which files can be made)"));
}

void check_host_bytes(const OffloadPlan& plan, std::int64_t machine_bytes, std::string_view machine, int num_ranks) {
  const std::int64_t most = machine_bytes / std::max(num_ranks, 1);
  if (machine_bytes <= 0 || plan.host_bytes <= most) return;
  const std::string ranks = str(" for each of ", num_ranks, " ranks");
  refuse_key("host_bytes", str(plan.host_bytes, num_ranks > 1 ? ranks : "", " is above the memory of ", machine,
                               num_ranks > 1 ? str(", ", limit_and_text(machine_bytes)) : "", " (at most ", most, ", ",
                               limit_text(most), ")"));
}

void check_offload(const OffloadPlan& plan) {
  check_budgets(plan);
  check_effects(plan);
  check_disk(plan);
}

}  // namespace stepgraph
