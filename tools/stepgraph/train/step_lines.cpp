#include "tools/stepgraph/train/step_lines.hpp"

#include <utility>

#include "tools/stepgraph/logs/train_records.hpp"

namespace stepgraph::cli {

void StepLines::print(const StepLine& line) {
  const StepResult& result = line.result;
  last_line_               = step_line(line.step, result, line.tokens_per_s, line.state, options_.json);
  if (options_.every > 0 && line.step % options_.every == 0) print_last();
  if (records_ != nullptr)
    records_->add(StepRecord{.step         = line.step,
                             .loss         = result.loss,
                             .rate         = result.rate,
                             .grad_norm    = result.grad_norm,
                             .tokens_per_s = line.tokens_per_s,
                             .seconds      = line.state.seconds});
}

std::optional<StepLine> StepLines::add(const StepLine& line) {
  if (!line.result.norm_is_late) {
    print(line);
    return std::nullopt;
  }
  std::optional<StepLine> before;
  if (late_) before = complete(line.result.earlier_norm.value_or(std::nan("")));
  late_ = line;
  return before;
}

StepLine StepLines::complete(double norm) {
  StepLine line            = *std::exchange(late_, std::nullopt);
  line.result.grad_norm    = norm;
  line.result.norm_is_late = false;
  line.result.skipped      = line.result.loss_scale && !std::isfinite(norm);
  late_norm_               = norm;
  print(line);
  return line;
}

void StepLines::print_last() {
  if (!last_line_.empty()) output_.print(std::exchange(last_line_, {}));
}

}  // namespace stepgraph::cli
