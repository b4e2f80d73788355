#pragma once
#include <span>
#include <string>

#include "graphs/plan/offload_plan.hpp"
#include "graphs/step/offload/homes.hpp"

// Settings of OffloadPlan that a step does not use. They are not errors: what a step moves can depend on its budgets,
// so the same config can use them with a smaller device.
namespace stepgraph {

// What a step uses.
struct OffloadUse {
  bool something  = false;  // is moved
  bool disk       = false;
  bool params     = false;  // weights are moved
  bool compressed = false;
  bool slots      = true;  // something is copied to slots: the host does not update all that is moved in place
};
[[nodiscard]] OffloadUse use_of(std::span<const OffloadedUnit> units);

// "note: offload.disk has no effect: host memory has room for all that is moved". Empty: there is no such setting.
// Defaults are not named.
[[nodiscard]] std::string idle_settings_text(const OffloadPlan& plan, const OffloadUse& use);

}  // namespace stepgraph
