#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "graphs/files/batches.hpp"
#include "graphs/schedule/search.hpp"
#include "graphs/train/step_run.hpp"

namespace stepgraph {

class ModelFolder;  // graphs/models/model_folder.hpp
class WindowRuns;   // graphs/train/window_run.hpp

// Sets fresh weights, the same bits in every layout; or the weights of a folder.
void set_fresh_weights(StepRun& run, std::uint64_t seed);
void set_weights(StepRun& run, const ModelFolder& folder);

// Writes config.json and model.safetensors, which Hugging Face transformers can load. The folder changes as a whole,
// and its other files stay: engine/base/output_folder.hpp. Throws Error(run) for weights that are not finite; the
// folder is then as it was. Both functions are collective: process 0 writes, and its error is thrown in all processes.
void save_model(const StepRun& run, const std::string& folder);
// The gradients of the last run, before clipping, under the names of the tensors.
void save_gradients(const StepRun& run, const std::string& path);

// Of a step of an asynchronous window. The staleness of a rank in a step is the number of the step less the number of
// steps that the slowest rank had completed when the rank took its version of the weights: at most max_staleness.
struct StepStaleness {
  double mean              = 0;  // over ranks
  std::int64_t largest     = 0;
  std::int64_t num_dropped = 0;  // gradients that were not applied: not finite, or of no target that counts
};

// A step whose gradient norm is infinite or not a number leaves weights and optimizer state unchanged.
struct StepResult {
  double loss      = 0;  // the mean over all targets of the step that count, before the update
  double grad_norm = 0;  // before clipping, without the scale; NaN if it is late
  double rate      = 0;  // the learning rate of this step; optimizer groups may have others
  // With loss scaling: the scale of this step, and whether its gradients overflowed.
  std::optional<double> loss_scale = {};
  bool skipped                     = false;
  // With a delayed update (UpdatePlan::delays) the norm of a step, and whether it overflowed, is known after the next
  // step: then `earlier_norm` is that of the step before; none: there was no step before it since the start.
  bool norm_is_late                  = false;
  std::optional<double> earlier_norm = {};
  // With UpdateWhen::asynchronous. The norm is then the root of the mean square over ranks, each of its own gradient;
  // the loss scale is the smallest of any rank; and the step is skipped if the gradients of all ranks overflowed.
  std::optional<StepStaleness> staleness = {};
};

struct TrainerOptions {
  int threads = 0;
  std::chrono::milliseconds step_timeout{0};
  std::chrono::milliseconds stall_timeout{0};
  bool keep_gradients    = false;    // for save_gradients
  std::uint64_t seed     = 0;        // of dropout, and of fresh weights where none are set before the first step
  const Machine* machine = nullptr;  // StepOptions::machine
  bool update_first      = false;    // StepOptions::update_first
  // StepOptions::offload_rates and simulator; no rates on a world with devices: usual_offload_rates.
  std::optional<OffloadRates> offload_rates = {};
  const Machine* simulator                  = nullptr;
  MakeStorage storage                       = {};  // RunOptions::storage
  // SplitOptions::on_search: process 0 calls it in the constructor.
  std::function<void(const SearchProgress&)> on_search = {};
  // With UpdateWhen::asynchronous: the most steps that run without waiting for each other's end. The time-outs are
  // those of a window.
  int window = 1;
  // For tests and benchmarks: changes the graph of a step before it is proved.
  std::function<Graph(const Graph&)> change = {};
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

  // Steps one after another. With UpdateWhen::asynchronous they run in windows of up to TrainerOptions::window steps,
  // in which ranks do not wait for each other; a recorder keeps the last window. A window ends with all ranks together,
  // and step() is a window of one step.
  std::vector<StepResult> steps(std::span<const Batch> batches, Recorder* recorder = nullptr);

  // Builds and proves what steps() needs for so many batches, so that it does not do so itself.
  void prepare_steps(std::size_t count);
  // The longest window; 1 unless the plan has UpdateWhen::asynchronous.
  [[nodiscard]] int window() const noexcept { return std::max(1, static_cast<int>(run_->step().window.size())); }

  // What a recorder has recorded last: run(), or a shorter window. Valid until the next step.
  [[nodiscard]] StepView recorded() const;

  // Valid until set_update_mode.
  [[nodiscard]] StepRun& run() noexcept { return *run_; }
  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  // Changes Plan::update between steps: makes another graph, to which weights, optimizer states, counters and the loss
  // scale are carried over. Gradients that wait for their update are dropped: returns the number of their sets. If it
  // throws, the trainer goes on as before. Evaluators and CheckpointWriters of this trainer remain valid. Collective.
  int set_update_mode(const UpdatePlan& update);
  // How often set_update_mode has replaced run().
  [[nodiscard]] int num_replaced() const noexcept { return num_replaced_; }
  // The gradient norm of the last step, also where StepResult::norm_is_late: then it is computed from copies, so that
  // steps that follow are not changed. NaN: there was no step, or its gradients were dropped. Collective.
  [[nodiscard]] double last_grad_norm();
  [[nodiscard]] std::uint64_t seed() const noexcept { return seed_; }
  [[nodiscard]] std::int64_t num_steps() const noexcept { return num_steps_; }  // done so far
  void set_num_steps(std::int64_t done) noexcept { num_steps_ = done; }  // the next step is number `done`, from 0
  // Updates done so far: steps less those that were skipped, and those whose gradients wait. AdamW's correction of its
  // means follows this number.
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
  void flush() { run_->flush(); }

 private:
  friend class Evaluator;
  StepResult run_step(Recorder* recorder);
  [[nodiscard]] StepGraph make_step(const Model& model, const Plan& plan, const BatchSpec& batch, int window) const;
  [[nodiscard]] std::unique_ptr<StepRun> make_run(StepGraph step) const;
  [[nodiscard]] std::vector<double> rates(std::int64_t step) const;  // the optimizer's, then those of its groups
  [[nodiscard]] StepGraph make_window(int steps) const;
  [[nodiscard]] bool is_asynchronous() const noexcept { return plan_.update.mode == UpdateWhen::asynchronous; }
  StepResult run_window(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets,
                        Recorder* recorder);

  struct LastNorm;  // the graph of last_grad_norm
  struct DeleteLastNorm {
    void operator()(LastNorm* of) const noexcept;
  };

  Plan plan_;
  TrainerOptions options_;
  World* world_;
  std::unique_ptr<StepRun> run_;
  int num_replaced_ = 0;
  std::unique_ptr<LastNorm, DeleteLastNorm> last_norm_;  // made when it is first needed
  std::shared_ptr<WindowRuns> windows_;                  // made by the first window
  RateSchedule schedule_;
  std::optional<double> fixed_rate_;
  std::uint64_t seed_;
  std::int64_t num_steps_ = 0;
  double grad_norm_       = std::numeric_limits<double>::quiet_NaN();  // of the last step; NaN: none, or it is late
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
  [[nodiscard]] std::int64_t num_counted() const noexcept { return run_->num_counted(); }  // targets of the last batch
  [[nodiscard]] StepRun& run() noexcept { return *run_; }  // valid until the trainer's set_update_mode

 private:
  double run_batch();
  void use_trainer();  // makes run_ anew if set_update_mode has replaced the trainer's run

  Trainer* trainer_ = nullptr;
  BatchSpec batch_;
  int num_replaced_ = 0;  // of the trainer, when run_ was made
  std::unique_ptr<StepRun> run_;
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
