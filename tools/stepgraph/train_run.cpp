#include "tools/stepgraph/train_run.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <utility>

#include "engine/base/error.hpp"
#include "graphs/predict/step_report.hpp"
#include "graphs/step/asynchronous.hpp"
#include "graphs/step/shard_report.hpp"
#include "graphs/train/broadcast_weights.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/interrupt.hpp"
#include "tools/stepgraph/measured_device.hpp"
#include "tools/stepgraph/output.hpp"
#include "tools/stepgraph/search_line.hpp"
#include "tools/stepgraph/step_summary.hpp"
#include "tools/stepgraph/together.hpp"
#include "tools/stepgraph/train_checkpoints.hpp"
#include "tools/stepgraph/train_eval.hpp"
#include "tools/stepgraph/train_lines.hpp"
#include "tools/stepgraph/train_records.hpp"
#include "tools/stepgraph/train_resume.hpp"

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

// The steps of the longest window. Those between two evaluations, or checkpoints, are divided evenly.
int window_of(const Config& config, const Model& model, std::optional<std::int64_t> steps) {
  std::int64_t window = usual_window(model, config.plan, config.batch);
  const auto divide   = [&](std::int64_t every) {
    const std::int64_t windows = (every + window - 1) / window;
    if (every > 0) window = (every + windows - 1) / windows;
  };
  divide(config.eval.every);
  if (!config.checkpoint.folder.empty()) divide(config.checkpoint.every);
  if (steps) window = std::clamp<std::int64_t>(*steps, 1, window);
  return static_cast<int>(window);
}

Trainer make_trainer(const TrainOptions& options, const Config& config, const Start& start, const Batches& batches,
                     World& world, const Machine* machine, const std::optional<MeasuredDevice>& device) {
  if (options.dump_grads && config.plan.update.mode == UpdateWhen::asynchronous)
    throw Error(ErrorKind::config,
                "--dump-grads: with update.mode asynchronous there is no gradient of the whole batch (synchronous)");
  SearchLine search(true);
  return Trainer(start.model, config.plan, config.batch, world,
                 {.threads        = threads_here(world, config.threads),
                  .stall_timeout  = stall_timeout(config, world),
                  .keep_gradients = options.dump_grads.has_value(),
                  .seed           = config.seed,
                  .machine        = machine,
                  .offload_rates  = offload_rates_of(config, device),
                  .simulator      = simulator_of(device),
                  .storage        = storage_of(config),
                  .on_search      = [&](const SearchProgress& progress) { search.show(progress); },
                  .window = window_of(config, start.model, options.steps ? options.steps : batches.num_steps())});
}

bool writes_files(const TrainOptions& options, const Config& config) {
  return options.save || options.dump_grads || options.trace || options.log || options.tensorboard ||
         !config.checkpoint.folder.empty();
}

// One run of the command.
class TrainRun {
 public:
  TrainRun(const TrainOptions& options, const Config& config, const Start& start, const ResumeFrom& from,
           const Interrupt& interrupt, World& world)
      : options_(options),
        config_(config),
        world_(world),
        interrupt_(interrupt),
        batches_(make_batches(config, start.model.vocab)),
        machine_(chooser_machine(config)),
        device_(measured_device(config)),
        trainer_(make_trainer(options, config, start, batches_, world, pointer_to(machine_), device_)) {
    if (from.path.empty()) {
      set_weights(trainer_.run(), start, config.seed);
    } else {
      resumed_ = load_resumed(trainer_, from, options, config, batches_, world);
    }
    const CheckpointState done = resumed_ ? resumed_->state : CheckpointState{};
    first_sequence_            = done.position;
    num_steps_ = choose_steps(batches_, options.steps, {.steps = done.steps, .sequences = done.position});
    trainer_.set_total_steps(num_steps_);
    state_.steps = state_.first_step = done.steps;
    state_.tokens                    = done.position * config.batch.seq;
    if (resumed_ && is_first(world)) compare_schedules(done, config, num_steps_);
    if (done.waiting && done.waiting->num_sets > 0 && !config.plan.update.delays())
      output_.print_note(
          str(resumed_->path, ": ", done.waiting->num_sets, done.waiting->num_sets == 1 ? " set" : " sets",
              " of gradients that wait for their update are dropped: update.mode is ", config.plan.update.mode));
    eval_.emplace(trainer_, config, start.model.vocab);
    checkpoints_.emplace(trainer_, config, output_, done.steps, resumed_ ? resumed_->path : std::string());
    in_first(world, "log files", [&] {
      records_.emplace(progress_, TrainRecords::Targets{.log = options.log, .tensorboard = options.tensorboard},
                       done.steps);
    });
  }

  void run() {
    print_plan();
    if (state_.steps >= num_steps_ && resumed_) {
      output_.print_note(
          str(resumed_->path, " has ", state_.steps, " steps, and the run ", num_steps_, ": nothing is left to do"));
    } else {
      train();
    }
    progress_.clear();
    // What took longest to make is saved first. An error of one thing does not stop the others.
    if (!flawed_) save_checkpoint();
    checkpoints_->finish();
    const Saved saved = save();
    std::optional<Error> no_trace;
    try {
      if (options_.trace) write_recorded();
    } catch (const Error& error) {
      no_trace = error;
    }
    print_summary();
    end(saved, no_trace);
  }

 private:
  struct Saved {
    std::string text             = {};  // for messages
    std::optional<Error> failure = {};
  };

  [[nodiscard]] bool interrupted() const { return state_.steps < num_steps_ && boundary_.stop.signal != 0; }

  // Throws unless all is well.
  void end(const Saved& saved, const std::optional<Error>& no_trace) {
    const std::optional<Error> no_records = records_ ? records_->failure() : std::nullopt;
    std::string more;
    std::optional<Error> first = failure_;
    const auto add             = [&](const std::optional<Error>& error) {
      if (!error) return;
      if (first) {
        more += str("; ", error->what());
      } else {
        first = error;
      }
    };
    add(saved.failure);
    add(checkpoints_->failure());
    if (!first && interrupted()) {
      if (!checkpoints_->path().empty()) more = str("; checkpoint ", checkpoints_->path());
      for (const std::optional<Error>* error : {&std::as_const(no_gradients_), &no_trace, &no_records})
        if (*error) more += str("; ", (*error)->what());
      throw Interrupted(boundary_.stop.signal,
                        str("interrupted after ", state_.steps, " of ", num_steps_, " steps", saved.text, more));
    }
    add(output_.failure());
    add(no_gradients_);
    add(no_trace);
    add(no_records);
    if (first) throw Error(first->kind(), str(first->what(), saved.text, more));
    if (boundary_.stop.output_closed || output_.ends_run()) throw OutputClosed{};
  }

  void print_plan() {
    std::optional<std::uint64_t> weights_hash;
    if (config_.plan.layout.dp > 1) weights_hash = broadcast_weights(trainer_.run());
    if (weights_hash == 0) weights_hash.reset();           // each rank has a different part: nothing to compare
    if (options_.trace) trainer_.run().memory().poison();  // so that used_bytes() can tell which bytes were written
    if (json_) output_.print(str("{\"type\":\"config\",", to_json(config_).substr(1)));
    output_.print(plan_text(config_, trainer_.run().step(), step_size(trainer_.run()),
                            {.json = json_, .weights_hash = weights_hash}));
    if (config_.plan.update.mode == UpdateWhen::asynchronous && config_.plan.layout.dp > 1)
      output_.print_note(
          "update.mode asynchronous: gradients are applied in the order in which they arrive, so a second run has "
          "other results");
    if (resumed_) output_.print(resume_line(state_.steps, resumed_->path, json_));
  }

  // Runs steps until the end, a signal or a failure. The weights are then those after state_.steps steps.
  void train() {
    // A terminal has the status line instead of lines for all steps.
    const bool status = !json_ && progress_.has_terminal() && isatty(STDOUT_FILENO) == 1;
    print_every_      = options_.log_every.value_or(status ? 0 : 1);
    const auto begin  = Clock::now();
    while (state_.steps < num_steps_ && !failure_) {
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
          result_.staleness && (result_.staleness->num_dropped < config_.plan.layout.dp || !results_.empty());
      if (!flawed_ || result_.norm_is_late || applied_some || std::isfinite(result_.grad_norm)) ++state_.steps;
      count_tokens();
      const StepLine line{.step         = step,
                          .result       = result_,
                          .tokens_per_s = static_cast<double>(batches_.tokens_per_step()) / step_s,
                          .state        = state_};
      if (result_.norm_is_late) {
        if (late_) print_late_line(result_.earlier_norm.value_or(std::nan("")));
        late_ = line;
      } else {
        print_line(line);
      }
      if (steps_run_ == 1 && options_.dump_grads) dump_gradients();
      if (is_first(world_)) show_progress(step);
      if (flawed_) break;
      if (eval_->is_due_after(state_.steps)) evaluate();
      if (checkpoints_->is_due_after(state_.steps)) save_checkpoint();
    }
    state_.steps += std::ssize(results_);  // of a window with a step that has failed: its weights have all steps
    complete_lines();
    if (!last_line_.empty()) output_.print(std::exchange(last_line_, {}));
  }

  struct StepLine {
    std::int64_t step = 0;
    StepResult result;
    double tokens_per_s = 0;
    TrainState state;
  };

  void print_line(const StepLine& line) {
    const StepResult& result = line.result;
    last_line_               = step_line(line.step, result, line.tokens_per_s, line.state, json_);
    if (print_every_ > 0 && line.step % print_every_ == 0) output_.print(std::exchange(last_line_, {}));
    if (records_)
      records_->add(StepRecord{.step         = line.step,
                               .loss         = result.loss,
                               .rate         = result.rate,
                               .grad_norm    = result.grad_norm,
                               .tokens_per_s = line.tokens_per_s,
                               .seconds      = line.state.seconds});
  }

  // The line of an earlier step, whose norm is known now.
  void print_late_line(double norm) {
    StepLine line            = *std::exchange(late_, std::nullopt);
    line.result.grad_norm    = norm;
    line.result.norm_is_late = false;
    line.result.skipped      = line.result.loss_scale && !std::isfinite(norm);
    last_norm_               = norm;
    print_line(line);
    if (failure_) return;
    failure_ = flaw_of(line.step, line.result);
    flawed_  = failure_.has_value();
  }

  // Before lines of other types, and at the end: no line of a step is missing.
  void complete_lines() {
    if (!late_) return;
    try {
      print_late_line(trainer_.last_grad_norm());
    } catch (const Error& error) {
      if (!failure_) failure_.emplace(error.kind(), str("the norm of the last step: ", error.what()));
    }
  }

  // The result of the next step. Steps of an asynchronous window run together: false: the run stops before it.
  bool next_result() {
    if (results_.empty()) {
      const std::vector<Batch> batches = read_window();
      if (!agree_to_go_on()) return false;
      trainer_.prepare_steps(batches.size());
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
  std::vector<Batch> read_window() {
    std::vector<Batch> batches;
    const std::int64_t most = std::min<std::int64_t>(trainer_.window(), num_steps_ - state_.steps);
    for (std::int64_t i = 0; i < most && !failure_; ++i) {
      batches.push_back(read_batch(position() + i * config_.batch.global));
      const std::int64_t after = state_.steps + i + 1;
      if (eval_->is_due_after(after) || checkpoints_->is_due_after(after)) break;
    }
    if (failure_ && batches.size() > 1) {  // the steps before it run first
      failure_.reset();
      batches.pop_back();
    }
    return batches;
  }

  // Before each step, or window, all processes decide together whether to stop, and about checkpoints.
  [[nodiscard]] bool agree_to_go_on() {
    boundary_ = agree(
        world_, {.stop    = {.signal = interrupt_.signal(), .output_closed = output_.ends_run(), .failure = failure_},
                 .save    = is_first(world_) && checkpoints_->is_due_by_time(),
                 .written = checkpoints_->is_written()});
    failure_ = boundary_.stop.failure;
    if (boundary_.written) checkpoints_->finish();
    if (boundary_.stop.wanted()) return false;
    if (boundary_.save) save_checkpoint();
    return true;
  }

  void save_checkpoint() {
    complete_lines();
    if (flawed_) return;
    checkpoints_->save(state_.steps, position(), config_to_keep(config_, batches_, num_steps_));
  }

  // Sequences that the run has consumed.
  [[nodiscard]] std::int64_t position() const {
    return first_sequence_ + (state_.steps - state_.first_step) * config_.batch.global;
  }

  void count_tokens() {
    state_.tokens     = position() * config_.batch.seq;
    state_.new_tokens = (position() - first_sequence_) * config_.batch.seq;
  }

  void show_progress(std::int64_t step) {
    const double norm = result_.norm_is_late ? last_norm_ : result_.grad_norm;
    const bool known  = !result_.norm_is_late || !std::isnan(norm);  // after the first stale step it is not
    progress_.show({.done             = step + 1,
                    .total            = num_steps_,
                    .loss             = result_.loss,
                    .rate             = result_.rate,
                    .grad_norm        = known ? std::optional(norm) : std::nullopt,
                    .tokens_per_s     = static_cast<double>(batches_.tokens_per_step()) / pace_.seconds_per_step(),
                    .seconds_per_step = pace_.seconds_per_step()});
  }

  void evaluate() {
    complete_lines();
    if (flawed_) return;
    try {
      const double loss = eval_->loss();
      output_.print(eval_line(state_.steps, loss, state_, json_));
      if (records_) records_->add(EvalRecord{.step = state_.steps, .loss = loss, .seconds = state_.seconds});
    } catch (const Error& error) {  // the run ends, and saves what it has
      failure_.emplace(error.kind() == ErrorKind::config ? ErrorKind::run : error.kind(),
                       str("eval after ", state_.steps, " steps: ", error.what()));
    }
  }

  // Fails if there are no more tokens: a file that became shorter.
  Batch read_batch(std::int64_t first_sequence) {
    try {
      return batches_.read(first_sequence);
    } catch (const Error& error) {
      failure_.emplace(error.kind() == ErrorKind::config ? ErrorKind::run : error.kind(), error.what());
      return {};
    }
  }

  void run_steps(const std::vector<Batch>& batches) {
    try {
      // Of an asynchronous run the longest window is kept, and of these the last.
      const bool traces = options_.trace && batches.size() >= steps_recorded_;
      const std::vector<StepResult> results =
          trainer_.steps(batches, traces || looks_at_offload() ? &recorder_ : nullptr);
      if (traces) {
        steps_recorded_ = batches.size();
        first_recorded_ = state_.steps;
      }
      results_.assign(results.begin(), results.end());
    } catch (const Error& error) {
      // Some weights may be updated and others not. A checkpoint of an earlier step that is under way is good.
      if (world_.peers() == nullptr) checkpoints_->finish();
      throw Error(error.kind(), str(error.what(), options_.save ? "; not saved: the step did not end" : ""));
    }
    if (looks_at_offload()) print_offload();
  }

  // The second step is recorded, or the only one: the first step can be slower.
  [[nodiscard]] bool looks_at_offload() const {
    const bool only = num_steps_ - state_.first_step == 1;
    return config_.plan.offload.moves_something() && steps_run_ == (only ? 0 : 1);
  }

  // All processes.
  void print_offload() {
    const OffloadFigures figures = offload_figures(trainer_.run(), recorder_.timeline());
    std::optional<PredictedStep> predicted;
    if (device_ && is_first(world_)) {
      try {
        const StepRun& run = trainer_.run();
        predicted          = predicted_step(run.step().graph, run.plan(), device_->machine);
      } catch (const Error& error) {
        output_.print_note(str("the step is not predicted: ", error.what()));
      }
    }
    const std::string line = offload_line(figures, config_.plan.offload, predicted, json_);
    json_ ? output_.print(line) : output_.print_note(line);
  }

  // Saves the model if it was trained.
  Saved save() {
    if (!options_.save) return {};
    if (state_.steps == 0 && num_steps_ > 0) return {.text = "; not saved: no step was completed"};
    try {
      save_model(trainer_.run(), *options_.save);
    } catch (const Error& error) {
      return {.failure = error};
    }
    return {.text =
                str("; model saved in ", *options_.save,
                    failure_ ? str(": the weights after ", state_.steps, state_.steps == 1 ? " step" : " steps") : "")};
  }

  // All processes have the same error. The run goes on, and ends with it.
  void dump_gradients() {
    try {
      save_gradients(trainer_.run(), *options_.dump_grads);
    } catch (const Error& error) {
      no_gradients_.emplace(ErrorKind::run, error.what());
      output_.print_note(str(error.what(), "; the run goes on without the gradients"));
    }
  }

  // The step or window that was recorded.
  [[nodiscard]] std::string trace_title() const {
    if (steps_recorded_ == 1) return str("step ", first_recorded_);
    return str("a window of ", steps_recorded_, " steps, from step ", first_recorded_);
  }

  void write_recorded() {
    if (steps_recorded_ == 0) {
      output_.print_note(str(*options_.trace, ": no trace is written, because no step has run"));
      return;
    }
    write_step_trace(trainer_.recorded(), recorder_, *options_.trace, {.title = trace_title()});
    const StepFigures figures = step_figures(trainer_.recorded(), recorder_.timeline());
    output_.print(json_ ? to_json(figures) : to_text(figures));
  }

  void print_summary() {
    const StepRun& run = trainer_.run();
    if (!is_first(world_)) return;
    if (config_.plan.shard.strategy != Shard::none && config_.plan.layout.dp > 1)
      output_.print(shard_line(shard_stats(run.step(), run.plan(), Rank{0}), config_.plan.shard.strategy, json_));
    output_.print(summary_line(state_, result_.loss, interrupted(), json_));
  }

  const TrainOptions& options_;
  const Config& config_;
  World& world_;
  const Interrupt& interrupt_;
  const bool json_ = options_.config.json;
  Batches batches_;
  std::int64_t first_sequence_ = 0;  // of the data, of the first step
  std::int64_t num_steps_      = 0;  // in all
  std::optional<Machine> machine_;   // comm.machine
  std::optional<MeasuredDevice> device_;
  Trainer trainer_;
  std::optional<Resumed> resumed_;
  Recorder recorder_;
  Progress progress_{{.what = "train", .log_lines = 0}};
  TrainOutput output_{progress_,
                      {.json = json_, .has_files = writes_files(options_, config_), .prints = is_first(world_)}};
  std::optional<TrainRecords> records_;  // in process 0
  std::optional<TrainEval> eval_;
  std::optional<TrainCheckpoints> checkpoints_;
  Pace pace_;
  TrainState state_;
  std::int64_t steps_run_      = 0;  // by this process, including a step whose result was not finite
  std::int64_t print_every_    = 1;
  std::size_t steps_recorded_  = 0;  // of the window that recorder_ has; 1: a step; 0: nothing
  std::int64_t first_recorded_ = 0;  // its first step
  std::string last_line_;            // of a step, that was not printed
  std::optional<StepLine> late_;     // of the last step, where its norm is not known yet
  double last_norm_ = std::nan("");  // that is known
  StepResult result_{.loss = std::nan(""), .grad_norm = std::nan("")};
  std::deque<StepResult> results_;  // of later steps of the same window
  double step_s_ = 0;               // of a step; in a window, the mean
  std::optional<Error> failure_, no_gradients_;
  bool flawed_ = false;  // the last step has made the weights useless, or has not changed them
  Boundary boundary_;    // as all processes have agreed
};

}  // namespace

void train_in(World& world, const TrainOptions& options, const Config& config) {
  const Interrupt interrupt;  // before a checkpoint is loaded, which may take long
  std::optional<CheckpointLock> lock;
  ResumeFrom from;
  from.path   = from_first(world, "checkpoint.folder", [&] {
    if (!config.checkpoint.folder.empty())
      lock.emplace(config.checkpoint.folder, std::chrono::seconds(options.restarted ? 6 : 1));
    from = prepare_resume(options, config);
    return str(from.newest ? "1" : "0", from.path);
  });
  from.newest = from.path.front() == '1';
  from.path.erase(0, 1);
  // A checkpoint has the weights: of a loaded model only the shape is needed.
  const Start start = from.path.empty() ? make_start(config, is_first(world))
                                        : Start{.model = model_of(config, is_first(world)), .folder = {}};
  TrainRun run(options, config, start, from, interrupt, world);
  in_first(world, "checkpoint.folder", [&] {  // the run can begin
    put_aside(from.aside);
    if (from.path.empty() && !config.checkpoint.folder.empty()) forget_start(config.checkpoint.folder);
  });
  run.run();
}

}  // namespace stepgraph::cli
