#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "graphs/step/data_parallel_step.hpp"
#include "graphs/train/step_run.hpp"

namespace stepgraph {

struct DataParallelResult {
  double loss               = 0;   // the mean over all tokens of the batch, before an update
  std::vector<float> logits = {};  // [global, seq, vocab]
  // Of the loss, by tensor, before clipping. With a delayed update there are none: the next step reduces them.
  std::map<std::string, std::vector<float>> gradients = {};
};

// A model on several devices of one process, used like one device that has the whole batch: `step` scatters the batch,
// runs forward and backward on all devices, and collects loss, logits and gradients. The step is proved and its memory
// is planned once, in the constructor. The root owns the weights and broadcasts them in each call, so a change of the
// root's weights (set_weights, or the caller's own optimizer) is a change on all devices. With `optimizer` a step
// updates them. All ranks of the world must live in this process. The world must outlive the object. One thread at a
// time.
class DataParallel {
 public:
  DataParallel(const Model& model, const DataParallelOptions& options, World& world);

  // global * seq + 1 tokens: inputs are all but the last, targets all but the first.
  DataParallelResult step(std::span<const std::int32_t> tokens);
  // The logits of global * seq tokens, [global, seq, vocab], without a loss. Its graph is made at the first call.
  [[nodiscard]] std::vector<float> forward(std::span<const std::int32_t> tokens);

  // Weights are fresh unless they were set: set_weights(parallel.run(), folder).
  // Both are valid until set_update_mode.
  [[nodiscard]] StepRun& run() noexcept { return *run_; }
  [[nodiscard]] const DataParallelStep& graph() const noexcept { return step_; }
  void set_rate(double rate) noexcept { rate_ = rate; }  // of the optimizer
  // Changes DataParallelOptions::update between steps, as Trainer::set_update_mode does.
  int set_update_mode(const UpdatePlan& update);

 private:
  struct Forward {
    DataParallelStep step;
    Program program;
  };
  void start();
  [[nodiscard]] std::unique_ptr<StepRun> make_run() const;
  [[nodiscard]] std::size_t num_logits() const;
  [[nodiscard]] Forward make_forward() const;

  Model model_;
  DataParallelOptions options_;
  DataParallelStep step_;
  World* world_;
  std::unique_ptr<StepRun> run_;
  std::optional<Forward> forward_;
  double rate_            = 0;
  std::int64_t num_steps_ = 0;
};

}  // namespace stepgraph
