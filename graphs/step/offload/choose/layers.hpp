#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "graphs/plan/plan.hpp"
#include "graphs/step/offload/choose/strategy.hpp"
#include "graphs/step/step_graph.hpp"

// Recompute::automatic: which layers are kept, recomputed and offloaded. Internal to graphs/.
namespace stepgraph {

// Layers of a rank are alike, so a choice is two numbers: the first layers are offloaded, because their backward pass
// comes last; the next ones are recomputed, the others kept.
struct LayerCounts {
  int offloaded                                                   = 0;
  int recomputed                                                  = 0;
  friend auto operator<=>(const LayerCounts&, const LayerCounts&) = default;
};

struct LayerTrial {
  std::int64_t device_bytes = 0;  // planned
  double time_s             = 0;  // simulated, if it fits
};

// One rank to choose for.
struct LayerCase {
  int num_layers            = 0;  // of the rank
  int most_offloaded        = 0;  // 0: activations may not be offloaded
  std::int64_t budget_bytes = 0;  // of the device
  // Kept free where that is possible: the plan of all ranks can need a little more than the plans of their slices.
  std::int64_t spare_bytes = 0;
  std::string budget_key   = {};  // "offload.device_bytes", for messages
  std::string subject      = {};  // "rank 3", for messages
  // The time of a trial is that of a step which uses the bytes that the trial leaves free. So more recomputed layers
  // than are needed can be faster.
  bool uses_room                                               = false;
  std::function<LayerTrial(const LayerCounts& counts)> attempt = {};  // slow: a memory plan and a simulation
};

struct LayerChoice {
  LayerCounts counts = {};
  LayerTrial trial   = {};
  int num_trials     = 0;  // attempts that were made
};

// All layers are kept, if that fits and room is not used otherwise. Else: for some numbers of offloaded layers, the
// fewest recomputed ones that fit; of these, the fastest. It takes about 12 attempts. Throws DoesNotFit if nothing
// fits, with the bytes that are needed.
[[nodiscard]] LayerChoice choose_layers(const LayerCase& of);

// By layer of the model. `own`: the layers of the rank, in their order.
[[nodiscard]] std::vector<ActivationMode> layer_modes(const LayerCounts& counts, const std::vector<int>& own,
                                                      int num_layers);

// The amounts of each rank of a training step with Recompute::automatic. Before it, what the plan offloads manually, or
// what its strategy moves beside activations; after it, units of the optimizer that fit stay on the device
// (keep_residents). Ranks of a tensor-parallel or data-parallel group share the choice of the first of them. Throws
// Error(config) also if the budget is not known.
[[nodiscard]] std::map<Rank, OffloadAmounts> choose_layers(const Plan& plan, const StepOptions& options,
                                                           const Slices& slices);

}  // namespace stepgraph
