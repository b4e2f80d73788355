#pragma once
#include <cstdint>
#include <functional>
#include <span>

#include "engine/plan/planned_sizes.hpp"
#include "graphs/step/memory/does_not_fit.hpp"
#include "graphs/step/memory_requirement.hpp"

// What a message says about a step that does not fit: changes of its config with which it fits. Each change was really
// built and planned, with the budgets of the config. Internal to graphs/.
namespace stepgraph {

// The planned bytes of the ranks that need most.
struct PlannedNeed {
  Rank rank              = {};  // that needs most of the device; of equals, the first
  std::int64_t device    = 0;   // with workspaces
  std::int64_t host      = 0;
  std::int64_t disk      = 0;
  std::int64_t num_nodes = 0;
};
[[nodiscard]] PlannedNeed need_of(const Graph& graph, const PlannedSizes& sizes);
[[nodiscard]] PlannedNeed need_of(std::span<const MemoryRequirement> requirements);

// Throws DoesNotFit if it is more than one of the plan's budgets.
void check_need(const PlannedNeed& need, const Plan& plan);

// Builds and plans a step as a run would. Throws Error where it cannot be built.
using PlanStep = std::function<PlannedNeed(const Plan& plan, const BatchSpec& batch)>;

struct FitSearch {
  Plan plan       = {};
  BatchSpec batch = {};
  bool trains     = true;
  PlanStep whole  = {};
  // By the slices of unlike ranks; empty: not possible. Where it takes fewer nodes than `whole`, it comes first.
  PlanStep slices        = {};
  bool has_all           = true;  // the step that does not fit has all ranks. If not, a change must fit by `slices` too
  double of_a_slice      = 1;     // the nodes of the slices of unlike ranks, as a multiple of those of `whole`
  std::int64_t num_nodes = 0;     // of the step that does not fit; 0: not known

  // Building takes time, so the search ends before it would have built more nodes: some seconds. The step without
  // budgets, the first change and the first larger budget are always built.
  static constexpr double most_nodes = 150'000;
  static constexpr double large      = 20'000;  // nodes: slices are tried before the whole step
  static constexpr int most_tried    = 40;      // changes and budgets, also if the number of nodes is not known
  static constexpr int most_offers   = 3;
  static constexpr int most_after    = 8;  // changes that are tried after the first that fits
};

// The same error for people: with the bytes that the step needs without budgets, where budgets drive a choice, and with
// what fits: "(recompute=full needs 546202240 (521 MiB), or memory.limit_bytes=798253696)".
[[nodiscard]] Error explained(const DoesNotFit& refused, const FitSearch& search);

}  // namespace stepgraph
