#include "tests/support/training/checkpointed.hpp"

#include <unistd.h>

#include <span>

#include "tests/support/training/short_training.hpp"

namespace stepgraph::testing {

Training::Training(const Model& of, const Plan& plan, const BatchSpec& batch, std::uint64_t seed)
    : world(Layout(plan.layout).num_ranks()),
      trainer(of, plan, batch, world, {.threads = 2, .seed = seed}),
      model(of),
      spec(batch) {}

std::vector<double> Training::train(int end) {
  std::vector<double> losses;
  while (trainer.num_steps() < end) {
    const int step = static_cast<int>(trainer.num_steps());
    losses.push_back(trainer.step(tokens_for(spec, step, model.vocab)).loss);
  }
  return losses;
}

std::uint64_t Training::weights() { return hash_weights(trainer.run()); }

std::string save_checkpoint(Trainer& trainer, const std::filesystem::path& folder, bool async) {
  const auto there = list_checkpoints(folder.string());
  CheckpointWriter writer(trainer, {.folder  = folder.string(),
                                    .loaded  = there.empty() ? std::string() : there.front().path,
                                    .keep    = 0,
                                    .async   = async,
                                    .replace = true});
  writer.save(trainer.num_steps() * checkpoint_batch.global);
  return writer.finish().value();
}

States states_of(const CheckpointReader& reader) {
  States states;
  for (const CheckpointTensor& tensor : reader.manifest().tensors) {
    for (const StateKind state : all_state_kinds) {
      if (!reader.manifest().has(state)) continue;
      std::vector<double>& values = states[{tensor.name, state}];
      values.resize(reader.num_elements(tensor.name));
      reader.read_tensor(tensor.name, state, std::span<double>(values));
    }
  }
  return states;
}

std::filesystem::path fast_folder() {
  return ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : std::filesystem::temp_directory_path();
}

}  // namespace stepgraph::testing
