#include "tools/stepgraph/train/eval.hpp"

#include "tools/stepgraph/session/session.hpp"

namespace stepgraph::cli {

TrainEval::TrainEval(Trainer& trainer, const Config& config, std::int64_t vocab) : plan_(config.eval) {
  if (plan_.every == 0) return;
  batches_.emplace(validation_batches(config, vocab));
  evaluator_.emplace(trainer, config.batch);
}

double TrainEval::loss() { return mean_loss(*evaluator_, *batches_, plan_.steps); }

}  // namespace stepgraph::cli
