#include <unistd.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <memory>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/output_folder.hpp"
#include "graphs/predict/step_report.hpp"
#include "graphs/step/shard_report.hpp"
#include "graphs/train/broadcast_weights.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/interrupt.hpp"
#include "tools/stepgraph/output.hpp"
#include "tools/stepgraph/session.hpp"
#include "tools/stepgraph/step_summary.hpp"
#include "tools/stepgraph/targets.hpp"
#include "tools/stepgraph/together.hpp"
#include "tools/stepgraph/train_lines.hpp"
#include "tools/stepgraph/worlds.hpp"

namespace stepgraph::cli {
namespace {

struct TrainOptions {
  ConfigOptions config;
  std::optional<std::int64_t> steps, log_every;
  std::optional<std::string> save, dump_grads, trace, flight;
  bool force = false;
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Checks that the results can be saved, before the training begins.
void check_targets(const TrainOptions& options) {
  for (const auto& [what, target] : {std::pair("--save", &options.save), std::pair("--dump-grads", &options.dump_grads),
                                     std::pair("--trace", &options.trace)}) {
    if (*target == "-")
      throw Error(ErrorKind::config, str(what, " -: stdout is for the results (a ",
                                         target == &options.save ? "folder" : "file", " name)"));
  }
  if ((options.dump_grads || options.trace) && options.steps == 0)
    throw Error(ErrorKind::config, "--steps 0: --dump-grads and --trace need a step (1 or more)");
  if (options.dump_grads && options.dump_grads == options.trace)
    throw Error(ErrorKind::config, str("--dump-grads and --trace: both write ", *options.trace, " (two files)"));
  check_target("--dump-grads", options.dump_grads, FileKind::safetensors, options.force);
  check_target("--trace", options.trace, FileKind::trace, options.force);
  check_model_target("--save", options.save, options.force);
  if (!options.save) return;
  for (const std::string& left : interrupted_folders(*options.save))
    std::cerr << "stepgraph train: " << left << ": left by an interrupted save (remove it if it is not needed)\n";
}

// Why a run cannot go on after a step.
std::optional<Error> flaw_of(std::int64_t step, const StepResult& result) {
  constexpr double least_scale = 0x1p-24;  // at this scale gradients cannot overflow because of the scale
  if (result.skipped && std::isfinite(result.loss) && *result.loss_scale <= least_scale)
    return Error(ErrorKind::run, str("step ", step, ": gradients overflow at every precision.loss_scale down to ",
                                     *result.loss_scale, " (precision.param bf16 or fp32)"));
  if (!std::isfinite(result.loss) || (!std::isfinite(result.grad_norm) && !result.skipped))
    return Error(ErrorKind::run, str("step ", step, ": loss ", result.loss, ", grad_norm ", result.grad_norm,
                                     step == 0 ? ": the weights are not finite or too large (a smaller "
                                                 "model.init_deviation, or other weights to load)"
                                               : " (a smaller optimizer.lr, or optimizer.clip)"));
  return std::nullopt;
}

// One run of the command.
class TrainRun {
 public:
  TrainRun(const TrainOptions& options, const Config& config, const Start& start, World& world)
      : options_(options),
        config_(config),
        world_(world),
        batches_(make_batches(config, start.model.vocab)),
        num_steps_(choose_steps(batches_, options.steps)),
        machine_(chooser_machine(config)),
        trainer_(start.model, config.plan, config.batch, world,
                 {.threads        = threads_here(world, config.threads),
                  .stall_timeout  = stall_timeout(config, world),
                  .keep_gradients = options.dump_grads.has_value(),
                  .seed           = config.seed,
                  .machine        = pointer_to(machine_)}) {
    trainer_.set_total_steps(num_steps_);
    set_weights(trainer_.run(), start, config.seed);
  }

  void run() {
    print_plan();
    train();
    progress_.clear();
    // First the model, which took the longest to make.
    const std::string saved = save();
    std::optional<Error> no_trace;
    try {
      if (options_.trace && steps_run_ > 0) write_last_step();
    } catch (const Error& error) {
      no_trace = error;
    }
    print_summary();
    const std::string more = saved + (no_trace ? str("; ", no_trace->what()) : "");
    if (failure_) throw Error(failure_->kind(), failure_->what() + more);
    if (interrupted())
      throw Interrupted(stop_.signal, str("interrupted after ", state_.steps, " of ", num_steps_, " steps", more));
    if (output_.failure()) throw Error(output_.failure()->kind(), output_.failure()->what() + more);
    if (no_trace) throw Error(no_trace->kind(), no_trace->what() + saved);
    if (stop_.output_closed || output_.ends_run()) throw OutputClosed{};
  }

 private:
  [[nodiscard]] bool interrupted() const { return state_.steps < num_steps_ && stop_.signal != 0; }

  void print_plan() {
    std::optional<std::uint64_t> weights_hash;
    if (config_.plan.layout.dp > 1) weights_hash = broadcast_weights(trainer_.run());
    if (weights_hash == 0) weights_hash.reset();           // each rank has a different part: nothing to compare
    if (options_.trace) trainer_.run().memory().poison();  // so that used_bytes() can tell which bytes were written
    if (json_) output_.print(str("{\"type\":\"config\",", to_json(config_).substr(1)));
    output_.print(plan_text(config_, trainer_.run().step(), step_size(trainer_.run()),
                            {.json = json_, .weights_hash = weights_hash}));
  }

  // Runs steps until the end, a signal or a failure. The weights are then those after state_.steps steps.
  void train() {
    // A terminal has the status line instead of lines for all steps.
    const bool status          = !json_ && progress_.has_terminal() && isatty(STDOUT_FILENO) == 1;
    const std::int64_t every   = options_.log_every.value_or(status ? 0 : 1);
    const std::int64_t in_all  = num_steps_;
    const auto tokens_per_step = static_cast<double>(batches_.tokens_per_step());
    const auto begin           = Clock::now();
    std::string last_line;  // that was not printed
    while (state_.steps < in_all && !failure_) {
      const std::int64_t step = state_.steps;
      const auto step_begin   = Clock::now();
      const Batch batch       = read_batch(step);
      stop_ = agree(world_, {.signal = interrupt_.signal(), .output_closed = output_.ends_run(), .failure = failure_});
      failure_ = stop_.failure;
      if (stop_.wanted()) break;
      run_step(batch);
      const double step_s = seconds_since(step_begin);
      pace_.add(step_s);
      state_.seconds = seconds_since(begin);
      failure_       = flaw_of(step, result_);
      // A step whose norm is not finite changes no weight.
      if (!failure_ || std::isfinite(result_.grad_norm)) ++state_.steps;
      state_.tokens = state_.steps * batches_.tokens_per_step();
      last_line     = step_line(step, result_, tokens_per_step / step_s, state_, json_);
      if (every > 0 && step % every == 0) output_.print(std::exchange(last_line, {}));
      if (step == 0 && options_.dump_grads) save_gradients(trainer_.run(), *options_.dump_grads);
      if (is_first(world_))
        progress_.show({.done             = step + 1,
                        .total            = in_all,
                        .loss             = result_.loss,
                        .grad_norm        = result_.grad_norm,
                        .tokens_per_s     = tokens_per_step / pace_.seconds_per_step(),
                        .seconds_per_step = pace_.seconds_per_step()});
    }
    if (!last_line.empty()) output_.print(last_line);
  }

  // Fails if there are no more tokens: a file that became shorter.
  Batch read_batch(std::int64_t step) {
    try {
      return batches_.read(step * config_.batch.global);
    } catch (const Error& error) {
      failure_.emplace(error.kind() == ErrorKind::config ? ErrorKind::run : error.kind(), error.what());
      return {};
    }
  }

  void run_step(const Batch& batch) {
    try {
      result_ = trainer_.step(batch, options_.trace ? &recorder_ : nullptr);
    } catch (const Error& error) {
      // Some weights may be updated and others not.
      throw Error(error.kind(), str(error.what(), options_.save ? "; not saved: the step did not end" : ""));
    }
    ++steps_run_;
  }

  // Saves the model if it was trained. Returns what was saved, for messages.
  std::string save() {
    if (!options_.save) return "";
    if (state_.steps == 0 && num_steps_ > 0) return "; not saved: no step was completed";
    try {
      save_model(trainer_.run(), *options_.save);
    } catch (const Error& error) {
      if (!failure_) throw;
      return str("; ", error.what());
    }
    return str("; model saved in ", *options_.save,
               failure_ ? str(": the weights after ", state_.steps, state_.steps == 1 ? " step" : " steps") : "");
  }

  void write_last_step() {
    write_step_trace(trainer_.run(), recorder_, *options_.trace, {.title = str("step ", steps_run_ - 1)});
    const StepFigures figures = step_figures(trainer_.run(), recorder_.timeline());
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
  const bool json_ = options_.config.json;
  Batches batches_;
  std::int64_t num_steps_;
  std::optional<Machine> machine_;  // comm.machine
  Trainer trainer_;
  Recorder recorder_;
  Interrupt interrupt_;
  Progress progress_{{.what = "train", .log_lines = 0}};
  TrainOutput output_{progress_, options_.save || options_.dump_grads || options_.trace, is_first(world_)};
  Pace pace_;
  TrainState state_;
  std::int64_t steps_run_ = 0;  // including a step whose result was not finite
  StepResult result_{.loss = std::nan(""), .grad_norm = std::nan("")};
  std::optional<Error> failure_;
  Stop stop_;  // as all processes have agreed
};

void run_train(const TrainOptions& options) {
  const Config config = read(options.config);
  WorldOptions world_options{.command = "train", .flight = options.flight};
  for (const auto* target : {&options.save, &options.dump_grads, &options.trace})
    if (*target) world_options.to_write.push_back(**target);
  in_world(world_options, config, [&](World& world) {
    require_same_job(world, config,
                     str(option_text("--steps", options.steps), option_text("--save", options.save),
                         option_text("--dump-grads", options.dump_grads), option_text("--trace", options.trace)));
    in_first(world, "files to write", [&] {
      warn_about_threads(config.threads);
      check_targets(options);
    });
    const Start start = make_start(config, is_first(world));
    TrainRun(options, config, start, world).run();
  });
}

}  // namespace

void add_train(Command program) {
  Command command = program.subcommand("train",
                                       "Train a model. Prints a line for each step with loss, gradient norm and "
                                       "speed; on a terminal, one line that is updated");
  auto options    = std::make_shared<TrainOptions>();
  add_config_options(command, options->config, true);
  command.option("--steps", options->steps, "Number of steps (default: all of the data)")
      .between(std::int64_t{0}, std::int64_t{1} << 40);
  command
      .option("--log-every", options->log_every,
              "Print a line for every Nth step and for the last one (default: 1; on a terminal, only the last)")
      .between(std::int64_t{1}, std::int64_t{1} << 40);
  command.option("--save", options->save,
                 "Save the trained model to this folder, as config.json and model.safetensors for transformers. The "
                 "folder is replaced at once; its other files stay");
  command.option("--dump-grads", options->dump_grads,
                 "Write the gradients of the first step, before clipping, to this .safetensors file");
  command.option("--trace", options->trace,
                 "Write the times of the last step to this file, for ui.perfetto.dev, and print a summary of them");
  add_flight_option(command, options->flight);
  add_force(command, options->force);
  command.footer(
      "SIGINT (Ctrl-C), SIGTERM and SIGHUP stop the run after the current step: the model is saved, and the exit code "
      "is 130, 143 or 129. A second SIGINT or SIGTERM, a second or more later, stops it at once. If the loss or the "
      "gradient norm is not finite, or the data ends early, the run ends and saves its weights. A step whose gradient "
      "norm is not finite has not changed them.\n"
      "Example: stepgraph train run.json --set layout.dp=2 --steps 100 --save model --json");
  command.run([options] { run_train(*options); });
}

}  // namespace stepgraph::cli
