#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "graphs/plan/plan.hpp"
#include "graphs/step/offload/homes.hpp"
#include "graphs/step/step_graph.hpp"

// How much a strategy of OffloadPlan moves. Internal to graphs/.
namespace stepgraph {

// One rank to choose for. Classes are in the order in which they are moved, that of fewest transfers for each byte
// first: optimizer, grads, params, activations.
struct StrategyCase {
  OffloadPlan plan          = {};
  std::string subject       = {};  // "rank 3", for messages
  std::int64_t budget_bytes = 0;   // of the device
  std::string budget_key    = {};  // "offload.device_bytes", for messages
  std::array<int, 4> units  = {};  // that may be moved, by class in the order above; 0: a class may not be moved
  // Recompute::automatic: activations are chosen by layer afterwards, so that more than the budget is not refused here.
  bool layers_follow = false;
  // The share of the bytes of all these units that the amounts move. Above 1: their homes fit neither host nor disk.
  std::function<double(const OffloadAmounts& amounts)> moved_share = {};
  // The same if offload.host_bytes and disk_bytes were not limited. Empty: they are not.
  std::function<double(const OffloadAmounts& amounts)> unlimited_share = {};
  // The planned bytes of the device. Slow: a whole memory plan.
  std::function<std::int64_t(const OffloadAmounts& amounts)> device_bytes = {};
};

struct StrategyChoice {
  OffloadAmounts amounts    = {};
  std::int64_t device_bytes = 0;  // planned
  std::int64_t bytes_before = 0;  // without offload
  double moved_share        = 0;
  [[nodiscard]] bool acts() const { return amounts != OffloadAmounts{}; }
};

// Nothing, where the planned bytes are at most threshold * budget. Else the fewest units that bring them there; or, if
// the strategy may not move so many, as many as it may. Throws DoesNotFit if the step then needs more than the
// budget.
[[nodiscard]] StrategyChoice choose_amounts(const StrategyCase& of);

// How choices look at the slices of single ranks.
struct Slices {
  std::function<StepGraph(Rank rank, const OffloadAmounts& amounts)> build = {};  // with given amounts
  // The rank that chooses for a rank that is like it (RankKinds::first_like), also where it is in another process. So a
  // choice costs what one slice costs.
  std::function<Rank(Rank rank)> first_like = {};
};

// The same for each rank of a step. Throws Error(config) also if the budget is not known.
[[nodiscard]] std::map<Rank, OffloadAmounts> choose_amounts(const Plan& plan, const StepOptions& options,
                                                            const Slices& slices);

// Strategy manual and device_bytes: ranks that fit it without offload, with amounts that move nothing. The ranks of a
// pipeline rank are judged by the first of them, because all ranks of a stage must recompute the same layers: they
// repeat collectives.
[[nodiscard]] std::map<Rank, OffloadAmounts> choose_nothing(const Plan& plan, const StepOptions& options,
                                                            const Slices& slices);

// Strategy manual with `optimizer` and device_bytes: the amounts that the fields say, or those of options.offload_of,
// filled up by fill_device.
[[nodiscard]] std::map<Rank, OffloadAmounts> keep_residents(const Plan& plan, const StepOptions& options,
                                                            const Slices& slices);

}  // namespace stepgraph
