#include "tests/support/training/device_training.hpp"

#include "backends/storage/spill_file.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/temp_folder.hpp"

namespace stepgraph::testing {

History train_on_device(Plan plan, const DeviceRun& run) {
  const TempFolder folder;
  const BatchSpec batch{.global = 4, .micro = 1, .seq = 16};
  const Model model = small_gpt2();
  const auto world  = device_world(Layout(plan.layout).num_ranks(), run.capture);
  TrainerOptions options{.threads = 2, .seed = 7, .update_first = run.update_first};
  if (run.on_disk) {
    plan.offload.disk       = folder.path().string();
    plan.offload.host_bytes = 64 << 10;
    options.storage         = spill_files(plan.offload.disk);
  }
  Trainer trainer(model, plan, batch, *world, options);
  Evaluator evaluator(trainer, batch);
  History history;
  for (int step = 0; step < run.steps; ++step) {
    const StepResult result = trainer.step(tokens_for(batch, step, model.vocab));
    history.loss.push_back(result.loss);
    history.grad_norm.push_back(result.grad_norm);
    if (step == 3) history.loss.push_back(evaluator.loss(tokens_for(batch, 9, model.vocab)));
  }
  history.weights = hash_weights(trainer.run());
  return history;
}

}  // namespace stepgraph::testing
