#pragma once
#include <cstdint>
#include <optional>

#include "graphs/config/config.hpp"
#include "graphs/train/trainer.hpp"

namespace stepgraph::cli {

// Validation during training, as the section `eval` says: on the trainer's own weights, between steps. Without
// eval.every nothing happens. Collective.
class TrainEval {
 public:
  TrainEval(Trainer& trainer, const Config& config, std::int64_t vocab);  // throws Error(config)

  [[nodiscard]] bool is_due_after(std::int64_t steps) const { return evaluator_ && steps % plan_.every == 0; }
  [[nodiscard]] double loss();  // the mean over eval.steps batches

 private:
  const EvalPlan& plan_;
  std::optional<Batches> batches_;
  std::optional<Evaluator> evaluator_;
};

}  // namespace stepgraph::cli
