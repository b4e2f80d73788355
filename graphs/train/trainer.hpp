#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "graphs/files/batches.hpp"
#include "graphs/train/step_run.hpp"

namespace stepgraph {

class ModelFolder;  // graphs/models/model_folder.hpp

// Sets fresh weights, the same bits in every layout; or the weights of a folder.
void set_fresh_weights(StepRun& run, std::uint64_t seed);
void set_weights(StepRun& run, const ModelFolder& folder);

// Writes config.json and model.safetensors, which Hugging Face transformers can load. The folder changes as a whole,
// and its other files stay: engine/base/output_folder.hpp. Throws Error(run) for weights that are not finite; the
// folder is then as it was. Both functions are collective: process 0 writes, and its error is thrown in all processes.
void save_model(const StepRun& run, const std::string& folder);
// The gradients of the last run, before clipping, under the names of the tensors.
void save_gradients(const StepRun& run, const std::string& path);

// A step whose gradient norm is infinite or not a number leaves weights and optimizer state unchanged.
struct StepResult {
  double loss      = 0;  // the mean over all targets of the step that count, before the update
  double grad_norm = 0;  // before clipping, without the scale
  double rate      = 0;  // the learning rate of this step; optimizer groups may have others
  // With loss scaling: the scale of this step, and whether its gradients overflowed.
  std::optional<double> loss_scale = {};
  bool skipped                     = false;
};

struct TrainerOptions {
  int threads = 0;
  std::chrono::milliseconds step_timeout{0};
  std::chrono::milliseconds stall_timeout{0};
  bool keep_gradients    = false;    // for save_gradients
  std::uint64_t seed     = 0;        // of dropout, and of fresh weights where none are set before the first step
  const Machine* machine = nullptr;  // StepOptions::machine
  bool update_first      = false;    // StepOptions::update_first
  MakeStorage storage    = {};       // RunOptions::storage
};

// Trains a model on a world: builds and proves the step, plans its memory, and runs it for each batch. In a world of
// several processes all of them make a Trainer and call step() with the same tokens; each has its own ranks, and all
// get the same result. The same holds for Evaluator and Generator.
class Trainer {
 public:
  Trainer(const Model& model, const Plan& plan, const BatchSpec& batch, World& world,
          const TrainerOptions& options = {});

  // Weights are fresh unless they were set: set_weights(trainer.run(), folder). `tokens` are global * seq + 1:
  // inputs are all but the last, targets all but the first. Or both are given; targets that are -1 do not count.
  StepResult step(std::span<const std::int32_t> tokens, Recorder* recorder = nullptr);
  StepResult step(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets,
                  Recorder* recorder = nullptr);
  StepResult step(const Batch& batch, Recorder* recorder = nullptr) {
    return step(batch.inputs, batch.targets, recorder);
  }

  [[nodiscard]] StepRun& run() noexcept { return run_; }
  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] std::uint64_t seed() const noexcept { return seed_; }
  [[nodiscard]] std::int64_t num_steps() const noexcept { return num_steps_; }  // done so far
  void set_num_steps(std::int64_t done) noexcept { num_steps_ = done; }  // the next step is number `done`, from 0
  // Updates done so far: steps less those that were skipped. AdamW's correction of its means follows this number.
  [[nodiscard]] std::int64_t num_updates() const;
  void set_num_updates(std::int64_t done);
  // The steps of the whole run, for a rate schedule that has no number of its own. Throws Error(config) if its phases
  // are longer.
  void set_total_steps(std::int64_t total);
  // The rate of the next step, by the schedule. Throws Error(config) if the schedule needs the number of steps.
  [[nodiscard]] double rate() const;
  // From now on this rate, instead of the schedule's. Groups keep their ratio to it.
  void set_rate(double rate) noexcept { fixed_rate_ = rate; }
  // Sets fresh weights unless weights were set. The first step does so too.
  void start_weights();
  // Does the update that the next step would begin with: StepRun::flush. Evaluators, checkpoints, save_model and
  // set_weights call it.
  void flush() { run_.flush(); }

 private:
  friend class Evaluator;
  StepResult run_step(Recorder* recorder);
  [[nodiscard]] std::vector<double> rates() const;  // the optimizer's, then those of its groups

  Plan plan_;
  TrainerOptions options_;
  StepRun run_;
  RateSchedule schedule_;
  std::optional<double> fixed_rate_;
  std::uint64_t seed_;
  std::int64_t num_steps_ = 0;
};

// The mean loss of a batch, without gradients.
class Evaluator {
 public:
  Evaluator(const Model& model, const Plan& plan, const BatchSpec& batch, World& world, const RunOptions& options = {});
  // On the trainer's own weights, of which there is no second copy: the graph uses their bytes. To be used between
  // steps; must not outlive the trainer.
  Evaluator(Trainer& trainer, const BatchSpec& batch);

  double loss(std::span<const std::int32_t> tokens);
  double loss(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets);
  double loss(const Batch& batch) { return loss(batch.inputs, batch.targets); }
  [[nodiscard]] std::int64_t num_counted() const noexcept { return run_.num_counted(); }  // targets of the last batch
  [[nodiscard]] StepRun& run() noexcept { return run_; }

 private:
  double run_batch();

  Trainer* trainer_ = nullptr;
  StepRun run_;
};

// The mean loss over all targets that count in the first `num_steps` batches, or in all if there are fewer. Collective:
// if one process cannot read a batch, its error is thrown in all.
[[nodiscard]] double mean_loss(Evaluator& evaluator, const Batches& batches, std::int64_t num_steps);

// Greedy generation: the next token is the one with the largest logit; of equals, the first. The model sees the last
// `window` tokens.
class Generator {
 public:
  Generator(const Model& model, const Plan& plan, int window, World& world, const RunOptions& options = {});
  [[nodiscard]] std::vector<std::int32_t> generate(std::vector<std::int32_t> prompt, int num_tokens);
  // The logits that follow a prompt of at most `window` tokens.
  [[nodiscard]] std::vector<double> logits(std::span<const std::int32_t> prompt);
  [[nodiscard]] StepRun& run() noexcept { return run_; }

 private:
  StepRun run_;
};

}  // namespace stepgraph
