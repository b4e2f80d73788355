#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/plan/plan.hpp"

// Changes of a plan with which a step may fit its budgets. They are data: what_fits.hpp tries them. Internal to
// graphs/.
namespace stepgraph {

// A plan that may need less memory, and the settings that lead to it.
struct Change {
  std::vector<std::string> settings = {};  // "recompute=full", as arguments of `--set`
  Plan plan                         = {};
  BatchSpec batch                   = {};

  [[nodiscard]] Change with(std::string setting, const auto& change) const {
    Change out = *this;
    out.settings.push_back(std::move(setting));
    change(out);
    return out;
  }
};
[[nodiscard]] std::string settings_text(const Change& change);

// In the order in which they are tried: the cheapest first, all together last. `key`: the budget that is too small. For
// offload.host_bytes and disk_bytes: a folder on disk, and less that is offloaded. For others: what needs less memory
// of the device.
[[nodiscard]] std::vector<Change> changes_for(std::string_view key, const Plan& plan, const BatchSpec& batch,
                                              bool trains);

// Sets a budget to these bytes, and with memory.limit_bytes and offload.device_bytes also the other of the two, if it
// is smaller. False: `key` is not the key of a budget.
bool enlarge_budget(Change& change, std::string_view key, std::int64_t bytes);

}  // namespace stepgraph
