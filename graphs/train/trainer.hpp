#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

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
  double loss      = 0;  // the mean over all tokens of the step, before the update
  double grad_norm = 0;  // before clipping, without the scale
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
};

// Trains a model on a world: builds and proves the step, plans its memory, and runs it for each batch. In a world of
// several processes all of them make a Trainer and call step() with the same tokens; each has its own ranks, and all
// get the same result. The same holds for Evaluator and Generator.
class Trainer {
 public:
  Trainer(const Model& model, const Plan& plan, const BatchSpec& batch, World& world,
          const TrainerOptions& options = {});

  // Weights are fresh unless they were set: set_weights(trainer.run(), folder).
  StepResult step(std::span<const std::int32_t> tokens, Recorder* recorder = nullptr);

  [[nodiscard]] StepRun& run() noexcept { return run_; }
  [[nodiscard]] std::int64_t num_steps() const noexcept { return num_steps_; }  // done so far
  void set_rate(double rate) noexcept { rate_ = rate; }
  void set_num_steps(std::int64_t done) noexcept { num_steps_ = done; }  // the next step is number `done`, from 0

 private:
  StepRun run_;
  double rate_;
  std::uint64_t seed_;
  std::int64_t num_steps_ = 0;
};

// The mean loss of a batch, without gradients.
class Evaluator {
 public:
  Evaluator(const Model& model, const Plan& plan, const BatchSpec& batch, World& world, const RunOptions& options = {});
  double loss(std::span<const std::int32_t> tokens);
  [[nodiscard]] StepRun& run() noexcept { return run_; }

 private:
  StepRun run_;
};

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
