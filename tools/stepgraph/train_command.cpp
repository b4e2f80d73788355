#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>

#include "engine/base/error.hpp"
#include "engine/look/trace.hpp"
#include "graphs/step/shard_report.hpp"
#include "graphs/train/broadcast_weights.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/interrupt.hpp"
#include "tools/stepgraph/output.hpp"
#include "tools/stepgraph/progress.hpp"
#include "tools/stepgraph/session.hpp"
#include "tools/stepgraph/step_summary.hpp"
#include "tools/stepgraph/worlds.hpp"

namespace stepgraph::cli {
namespace {

struct TrainOptions {
  ConfigOptions config;
  std::optional<std::int64_t> steps;
  std::optional<std::string> save, dump_grads, trace;
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
  check_can_write("--dump-grads", options.dump_grads);
  check_can_write("--trace", options.trace);
  if ((options.dump_grads || options.trace) && options.steps == 0)
    throw Error(ErrorKind::config, "--steps 0: --dump-grads and --trace need a step (1 or more)");
  if (options.dump_grads && options.dump_grads == options.trace)
    throw Error(ErrorKind::config, str("--dump-grads and --trace: both write ", *options.trace, " (two files)"));
  if (!options.save) return;
  std::error_code error;
  std::filesystem::create_directories(*options.save, error);
  std::error_code ignored;
  if (!std::filesystem::is_directory(*options.save, ignored))
    throw Error(ErrorKind::config,
                str("--save '", *options.save, "': the folder cannot be created", error ? ": " + error.message() : ""));
  for (const char* name : {"config.json", "model.safetensors"})
    check_can_write("--save", (std::filesystem::path(*options.save) / name).string());
}

// Prints the lines of a run. If the run also writes files, it continues after the reader of stdout has gone.
class Lines {
 public:
  Lines(Progress& progress, bool has_files) : progress_(progress), has_files_(has_files) {}

  void print(const std::string& line) {
    if (closed_) return;
    if (shares_terminal_) progress_.clear();
    try {
      print_line(line);
    } catch (const OutputClosed&) {
      if (!has_files_) throw;
      closed_ = true;
    }
  }

 private:
  Progress& progress_;
  bool has_files_;
  bool shares_terminal_ = isatty(STDOUT_FILENO) == 1;
  bool closed_          = false;
};

std::string step_line(std::int64_t step, const StepResult& result, double tokens_per_s, bool json) {
  if (json)
    return str("{\"type\":\"step\",\"step\":", step, ",\"loss\":", digits(result.loss),
               ",\"grad_norm\":", digits(result.grad_norm), ",\"tokens_per_s\":", digits(tokens_per_s),
               result.loss_scale ? str(",\"loss_scale\":", digits(*result.loss_scale),
                                       ",\"skipped\":", result.skipped ? "true" : "false")
                                 : "",
               "}");
  return str(
      "step ", step, "  loss ", short_number(result.loss, 17), "  grad_norm ", short_number(result.grad_norm, 17), "  ",
      short_number(tokens_per_s), " tokens/s",
      result.skipped ? str("  skipped: gradients overflow at loss scale ", short_number(*result.loss_scale)) : "");
}

std::string summary_line(std::int64_t steps, std::int64_t tokens, double seconds, double loss, bool interrupted,
                         bool json) {
  const double tokens_per_s = seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  if (json)
    return str("{\"type\":\"summary\",\"steps\":", steps, ",\"tokens\":", tokens, ",\"seconds\":", digits(seconds),
               ",\"tokens_per_s\":", digits(tokens_per_s), ",\"loss\":", digits(loss),
               ",\"interrupted\":", interrupted ? "true" : "false", "}");
  return str(steps, steps == 1 ? " step, " : " steps, ", tokens, " tokens in ", short_number(seconds, 4),
             " s: ", short_number(tokens_per_s), " tokens/s");
}

// The effect of sharding on rank 0.
std::string shard_line(const ShardStats& stats, Shard strategy, bool json) {
  if (json)
    return str("{\"type\":\"shard\",\"strategy\":\"", to_string(strategy),
               "\",\"rank\":0,\"whole_bytes\":", stats.whole_bytes, ",\"current_bytes\":", stats.current_bytes,
               ",\"peak_bytes\":", stats.peak_bytes, ",\"saved_bytes\":", stats.saved_bytes,
               ",\"local_ratio\":", digits(stats.local_ratio), ",\"all_gathers\":", stats.all_gathers,
               ",\"reduce_scatters\":", stats.reduce_scatters, ",\"all_reduces\":", stats.all_reduces, "}");
  const auto mib = [](std::int64_t bytes) { return short_number(static_cast<double>(bytes) / (1 << 20), 3); };
  return str("sharding (", to_string(strategy), "): rank 0 keeps ", short_number(100 * stats.local_ratio, 3),
             "% of the elements of its weights; weights, gradients and optimizer states take ",
             mib(stats.current_bytes), " MiB between steps and at most ", mib(stats.peak_bytes),
             " MiB in a step, instead of ", mib(stats.whole_bytes), " MiB; a step has ", stats.all_gathers,
             " all-gathers, ", stats.reduce_scatters, " reduce-scatters and ", stats.all_reduces,
             " gradient all-reduces");
}

void run_train(const TrainOptions& options) {
  const Config config = read(options.config);
  const bool json     = options.config.json;
  check_targets(options);
  const Start start = make_start(config);
  Batches batches(config, start.model.vocab, options.steps);
  const std::unique_ptr<World> world   = make_world(config.backend, Layout(config.plan.layout).num_ranks());
  const std::optional<Machine> machine = machine_of(config);
  Trainer trainer(start.model, config.plan, config.batch, *world,
                  {.threads        = config.threads,
                   .keep_gradients = options.dump_grads.has_value(),
                   .seed           = config.seed,
                   .machine        = pointer_to(machine)});
  set_weights(trainer.run(), start, config.seed);
  std::optional<std::uint64_t> weights_hash;
  if (config.plan.layout.dp > 1) weights_hash = broadcast_weights(trainer.run());
  if (weights_hash == 0) weights_hash.reset();  // each rank has a different part: nothing to compare

  if (options.trace) trainer.run().memory().poison();  // so that used_bytes() can tell which bytes were written
  const Interrupt interrupt;
  Progress progress({.what = "train", .log_lines = 0});
  Lines lines(progress, options.save || options.dump_grads || options.trace);
  if (json) lines.print(str("{\"type\":\"config\",", to_json(config).substr(1)));
  lines.print(
      plan_text(config, trainer.run().step(), trainer.run().plan(), {.json = json, .weights_hash = weights_hash}));
  Recorder recorder;
  StepResult result{.loss = std::nan(""), .grad_norm = std::nan("")};
  std::int64_t step         = 0;
  const std::int64_t in_all = batches.num_steps();
  const auto begin          = Clock::now();
  for (; step < in_all && !interrupt.requested(); ++step) {
    const auto step_begin     = Clock::now();
    result                    = trainer.step(batches.read(step), options.trace ? &recorder : nullptr);
    const double tokens_per_s = static_cast<double>(batches.tokens_per_step()) / seconds_since(step_begin);
    lines.print(step_line(step, result, tokens_per_s, json));
    if (step == 0 && options.dump_grads) save_gradients(trainer.run(), *options.dump_grads);
    constexpr double least_scale = 0x1p-24;  // at this scale gradients cannot overflow because of the scale
    if (result.skipped && std::isfinite(result.loss) && *result.loss_scale <= least_scale)
      throw Error(ErrorKind::run, str("step ", step, ": gradients overflow at every precision.loss_scale down to ",
                                      *result.loss_scale, " (precision.param bf16 or fp32)"));
    if (!std::isfinite(result.loss) || (!std::isfinite(result.grad_norm) && !result.skipped))
      throw Error(ErrorKind::run, str("step ", step, ": loss ", result.loss, ", grad_norm ", result.grad_norm,
                                      step == 0 ? ": the weights are not finite or too large (a smaller "
                                                  "model.init_deviation, or other weights to load)"
                                                : " (a smaller optimizer.lr, or optimizer.clip)"));
    progress.show({.done         = step + 1,
                   .total        = in_all,
                   .loss         = result.loss,
                   .tokens_per_s = tokens_per_s,
                   .seconds      = seconds_since(begin)});
  }
  const double seconds   = seconds_since(begin);
  const bool interrupted = step < in_all;
  progress.clear();
  if (options.save) save_model(trainer.run(), *options.save);  // first: the model took the longest to make
  if (options.trace && step > 0) {
    const StepRun& run      = trainer.run();
    const Timeline timeline = recorder.timeline();
    write_trace(run.runnable(), timeline, *options.trace, {.title = str("step ", step - 1)});
    const StepSummary summary = summarize_step(run, timeline);
    lines.print(json ? to_json(summary) : to_text(summary));
  }
  if (config.plan.shard.strategy != Shard::none && config.plan.layout.dp > 1)
    lines.print(
        shard_line(shard_stats(trainer.run().step(), trainer.run().plan(), Rank{0}), config.plan.shard.strategy, json));
  lines.print(summary_line(step, step * batches.tokens_per_step(), seconds, result.loss, interrupted, json));
  if (interrupted)
    throw Error(ErrorKind::run, str("interrupted after ", step, " of ", in_all, " steps",
                                    options.save ? str("; model saved in ", *options.save) : ""));
}

}  // namespace

void add_train(Command program) {
  Command command = program.subcommand("train",
                                       "Train a model. Prints a line for each step with loss, gradient norm and "
                                       "speed. Ctrl-C stops after the current step; a second Ctrl-C stops at once");
  auto options    = std::make_shared<TrainOptions>();
  add_config_options(command, options->config, true);
  command.option("--steps", options->steps, "Number of steps (default: all of the data)")
      .between(std::int64_t{0}, std::int64_t{1} << 40);
  command.option("--save", options->save,
                 "Save the trained model to this folder, as config.json and model.safetensors for transformers");
  command.option("--dump-grads", options->dump_grads,
                 "Write the gradients of the first step, before clipping, to this .safetensors file");
  command.option("--trace", options->trace,
                 "Write the times of the last step to this file, for ui.perfetto.dev, and print a summary of them");
  command.footer(
      "On the loopback backend no rank waits, so comm.timeout_ms never expires.\n"
      "Example: stepgraph train run.json --set layout.dp=2 --steps 100 --save model --json");
  command.run([options] { run_train(*options); });
}

}  // namespace stepgraph::cli
