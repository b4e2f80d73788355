#pragma once
#include <optional>
#include <vector>

#include "graphs/files/checkpoint_reader.hpp"
#include "graphs/train/trainer.hpp"

// Gradients that wait for their update (UpdatePlan::delays), in checkpoints: whole buffers, as each rank has them.
// Internal to graphs/train.
namespace stepgraph {

// The buffers of a rank, in one order: of each set the scale, the clip factor and the gradients.
[[nodiscard]] std::vector<Buffer> waiting_buffers(const StepRank& rank);

// None: the trainer does not delay its updates.
[[nodiscard]] std::optional<WaitingState> waiting_state(const Trainer& trainer, const StepRun& run);

// Throws Error(config) if the checkpoint has gradients that wait, and the trainer delays its updates but would keep
// them at other places.
void check_waiting(const CheckpointReader& reader, Trainer& trainer);

// Sets the gradients that wait, or drops them if the checkpoint has none.
void load_waiting(const CheckpointReader& reader, StepRun& run);

}  // namespace stepgraph
