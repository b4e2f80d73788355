#include "tools/stepgraph/train/loop.hpp"

#include <algorithm>
#include <chrono>

#include "engine/base/error.hpp"
#include "tools/stepgraph/terminal/interrupt.hpp"
#include "tools/stepgraph/train/parts.hpp"
#include "tools/stepgraph/train/resume.hpp"

namespace stepgraph::cli {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Why a run cannot go on after a step.
std::optional<Error> flaw_of(std::int64_t step, const StepResult& result) {
  constexpr double least_scale = 0x1p-24;  // at this scale gradients cannot overflow because of the scale
  if (result.skipped && std::isfinite(result.loss) && *result.loss_scale <= least_scale)
    return Error(ErrorKind::run, str("step ", step, ": gradients overflow at every precision.loss_scale down to ",
                                     *result.loss_scale, " (precision.param bf16 or fp32)"));
  // A late norm is looked at when it is known.
  const bool wrong_norm = !result.norm_is_late && !std::isfinite(result.grad_norm) && !result.skipped;
  if (!std::isfinite(result.loss) || wrong_norm)
    return Error(ErrorKind::run, str("step ", step, ": loss ", result.loss,
                                     result.norm_is_late ? "" : str(", grad_norm ", result.grad_norm),
                                     step == 0 ? ": the weights are not finite or too large (a smaller "
                                                 "model.init_deviation, or other weights to load)"
                                               : " (a smaller optimizer.lr, or optimizer.clip)"));
  return std::nullopt;
}

}  // namespace

TrainLoop::TrainLoop(TrainParts& parts, const Interrupt& interrupt) : parts_(parts), interrupt_(interrupt) {
  state_.steps = state_.first_step = parts.first_step;
  state_.tokens                    = parts.first_sequence * parts.config.batch.seq;
}

void TrainLoop::run() {
  const auto begin = Clock::now();
  while (state_.steps < parts_.num_steps && !failure_) {
    const std::int64_t step = state_.steps;
    if (!next_result()) break;
    const double step_s = step_s_;
    pace_.add(step_s);
    state_.seconds = seconds_since(begin);
    failure_       = flaw_of(step, result_);
    flawed_        = failure_.has_value();
    // A step whose norm is not finite changes no weight. If the norm is late, the step has updated weights with
    // gradients of an earlier step. If ranks do not wait for each other, the gradients of other ranks were applied,
    // or those of later steps.
    const bool applied_some =
        result_.staleness && (result_.staleness->num_dropped < parts_.config.plan.layout.dp || !results_.empty());
    if (!flawed_ || result_.norm_is_late || applied_some || std::isfinite(result_.grad_norm)) ++state_.steps;
    count_tokens();
    look_at(parts_.lines->add({.step         = step,
                               .result       = result_,
                               .tokens_per_s = static_cast<double>(parts_.batches.tokens_per_step()) / step_s,
                               .state        = state_}));
    if (steps_run_ == 1 && parts_.options.dump_grads) dump_gradients();
    if (is_first(parts_.world)) show_progress(step);
    if (flawed_) break;
    if (parts_.eval->is_due_after(state_.steps)) evaluate();
    if (parts_.checkpoints->is_due_after(state_.steps)) save_checkpoint();
  }
  state_.steps += std::ssize(results_);  // of a window with a step that has failed: its weights have all steps
  complete_lines();
  parts_.lines->print_last();
}

// At an earlier step, whose norm is known now.
void TrainLoop::look_at(const std::optional<StepLine>& late) {
  if (!late || failure_) return;
  failure_ = flaw_of(late->step, late->result);
  flawed_  = failure_.has_value();
}

// Before lines of other types, and at the end: no line of a step is missing.
void TrainLoop::complete_lines() {
  if (!parts_.lines->one_waits()) return;
  try {
    look_at(parts_.lines->complete(parts_.trainer.last_grad_norm()));
  } catch (const Error& error) {
    if (!failure_) failure_.emplace(error.kind(), str("the norm of the last step: ", error.what()));
  }
}

// The result of the next step. Steps of an asynchronous window run together: false: the run stops before it.
bool TrainLoop::next_result() {
  if (results_.empty()) {
    const std::vector<Batch> batches = read_window();
    if (!agree_to_go_on()) return false;
    parts_.trainer.prepare_steps(batches.size());
    const auto begin = Clock::now();
    run_steps(batches);
    step_s_ = seconds_since(begin) / static_cast<double>(batches.size());
  }
  result_ = results_.front();
  results_.pop_front();
  ++steps_run_;
  return true;
}

// The batches of the next step, or window: this ends at an evaluation, a checkpoint and the end of the run.
std::vector<Batch> TrainLoop::read_window() {
  std::vector<Batch> batches;
  const std::int64_t most = std::min<std::int64_t>(parts_.trainer.window(), parts_.num_steps - state_.steps);
  for (std::int64_t i = 0; i < most && !failure_; ++i) {
    batches.push_back(read_batch(position() + i * parts_.config.batch.global));
    const std::int64_t after = state_.steps + i + 1;
    if (parts_.eval->is_due_after(after) || parts_.checkpoints->is_due_after(after)) break;
  }
  if (failure_ && batches.size() > 1) {  // the steps before it run first
    failure_.reset();
    batches.pop_back();
  }
  return batches;
}

// Before each step, or window, all processes decide together whether to stop, and about checkpoints.
bool TrainLoop::agree_to_go_on() {
  boundary_ =
      agree(parts_.world,
            {.stop    = {.signal = interrupt_.signal(), .output_closed = parts_.output.ends_run(), .failure = failure_},
             .save    = is_first(parts_.world) && parts_.checkpoints->is_due_by_time(),
             .written = parts_.checkpoints->is_written()});
  failure_ = boundary_.stop.failure;
  if (boundary_.written) parts_.checkpoints->finish();
  if (boundary_.stop.wanted()) return false;
  if (boundary_.save) save_checkpoint();
  return true;
}

void TrainLoop::save_checkpoint() {
  complete_lines();
  if (flawed_) return;
  parts_.checkpoints->save(state_.steps, position(), config_to_keep(parts_.config, parts_.batches, parts_.num_steps));
}

// Sequences that the run has consumed.
std::int64_t TrainLoop::position() const {
  return parts_.first_sequence + (state_.steps - parts_.first_step) * parts_.config.batch.global;
}

void TrainLoop::count_tokens() {
  state_.tokens     = position() * parts_.config.batch.seq;
  state_.new_tokens = (position() - parts_.first_sequence) * parts_.config.batch.seq;
}

void TrainLoop::show_progress(std::int64_t step) {
  const double norm = result_.norm_is_late ? parts_.lines->late_norm() : result_.grad_norm;
  const bool known  = !result_.norm_is_late || !std::isnan(norm);  // after the first stale step it is not
  parts_.progress.show(
      {.done             = step + 1,
       .total            = parts_.num_steps,
       .loss             = result_.loss,
       .rate             = result_.rate,
       .grad_norm        = known ? std::optional(norm) : std::nullopt,
       .tokens_per_s     = static_cast<double>(parts_.batches.tokens_per_step()) / pace_.seconds_per_step(),
       .seconds_per_step = pace_.seconds_per_step()});
}

void TrainLoop::evaluate() {
  complete_lines();
  if (flawed_) return;
  try {
    const double loss = parts_.eval->loss();
    parts_.output.print(eval_line(state_.steps, loss, state_, parts_.json));
    if (parts_.records) parts_.records->add(EvalRecord{.step = state_.steps, .loss = loss, .seconds = state_.seconds});
  } catch (const Error& error) {  // the run ends, and saves what it has
    failure_.emplace(error.kind() == ErrorKind::config ? ErrorKind::run : error.kind(),
                     str("eval after ", state_.steps, " steps: ", error.what()));
  }
}

// Fails if there are no more tokens: a file that became shorter.
Batch TrainLoop::read_batch(std::int64_t first_sequence) {
  try {
    return parts_.batches.read(first_sequence);
  } catch (const Error& error) {
    failure_.emplace(error.kind() == ErrorKind::config ? ErrorKind::run : error.kind(), error.what());
    return {};
  }
}

void TrainLoop::run_steps(const std::vector<Batch>& batches) {
  const TrainRecording::Steps steps{.first = state_.steps,
                                    .count = batches.size(),
                                    .index = steps_run_,
                                    .total = parts_.num_steps - parts_.first_step};
  try {
    const std::vector<StepResult> results = parts_.trainer.steps(batches, parts_.recording.recorder_for(steps));
    parts_.recording.note_run(steps);
    results_.assign(results.begin(), results.end());
  } catch (const Error& error) {
    // Some weights may be updated and others not. A checkpoint of an earlier step that is under way is good.
    if (parts_.world.peers() == nullptr) parts_.checkpoints->finish();
    throw Error(error.kind(), str(error.what(), parts_.options.save ? "; not saved: the step did not end" : ""));
  }
  parts_.recording.print_offload(steps, is_first(parts_.world));
}

// All processes have the same error. The run goes on, and ends with it.
void TrainLoop::dump_gradients() {
  try {
    save_gradients(parts_.trainer.run(), *parts_.options.dump_grads);
  } catch (const Error& error) {
    no_gradients_.emplace(ErrorKind::run, error.what());
    parts_.output.print_note(str(error.what(), "; the run goes on without the gradients"));
  }
}

}  // namespace stepgraph::cli
