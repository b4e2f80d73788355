#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "engine/base/error.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/processes/together.hpp"
#include "tools/stepgraph/processes/worlds.hpp"
#include "tools/stepgraph/session/config_options.hpp"
#include "tools/stepgraph/session/plan_text.hpp"
#include "tools/stepgraph/session/session.hpp"
#include "tools/stepgraph/terminal/interrupt.hpp"
#include "tools/stepgraph/terminal/output.hpp"
#include "tools/stepgraph/terminal/progress.hpp"

namespace stepgraph::cli {
namespace {

struct EvalOptions {
  ConfigOptions config;
  std::optional<std::int64_t> steps;
  std::optional<std::string> flight;
};

// The sequences of some steps. The last step may have fewer than the others.
std::int64_t num_read(const Batches& batches, const BatchSpec& batch, std::int64_t num_steps) {
  const std::int64_t most = num_steps * batch.global;
  return std::min(most, batches.num_sequences().value_or(most));
}

// Tokens at the end of the data that no step predicts. 0 for data without end.
std::int64_t num_left_out(const Batches& batches, const BatchSpec& batch, std::int64_t num_steps) {
  if (!batches.num_sequences()) return 0;
  const std::int64_t beyond = (*batches.data().num_tokens() - 1) % batch.seq;  // too few for a sequence
  return (*batches.num_sequences() - num_read(batches, batch, num_steps)) * batch.seq + beyond;
}

// "; the last 8 tokens, too few for a batch, are left out"
std::string left_out_text(std::int64_t tokens, const Batches& batches, const BatchSpec& batch, std::int64_t num_steps) {
  if (tokens == 0) return "";
  const bool is_end = num_steps == batches.num_steps();
  return str("; the last ", tokens, tokens == 1 ? " token" : " tokens",
             !is_end              ? ""
             : tokens < batch.seq ? ", too few for a sequence,"
                                  : ", too few for a batch,",
             tokens == 1 ? " is" : " are", " left out");
}

void run_eval(const EvalOptions& options, const Config& config, World& world) {
  require_same_job(world, config, option_text("--steps", options.steps));
  if (is_first(world)) warn_about_threads(config.threads);
  const Start start                    = make_start(config, is_first(world));
  const Batches batches                = validation_batches(config, start.model.vocab);
  const std::int64_t num_steps         = choose_steps(batches, options.steps);
  const std::optional<Machine> machine = chooser_machine(config);
  Evaluator evaluator(start.model, config.plan, config.batch, world,
                      {.threads       = threads_here(world, config.threads),
                       .stall_timeout = stall_timeout(config, world),
                       .reuse         = config.plan.reuse,
                       .machine       = pointer_to(machine),
                       .storage       = storage_of(config)});
  if (is_first(world)) note_rounded_weights("eval", config, evaluator.run().step());
  set_weights(evaluator.run(), start, config.seed);

  using Clock = std::chrono::steady_clock;
  const Interrupt interrupt;
  Progress progress({.what = "eval", .log_lines = options.config.json ? 0 : 10});
  Pace pace;
  double sum = 0, seconds = 0;
  std::int64_t counted = 0;  // targets; ignored ones do not count
  for (std::int64_t step = 0; step < num_steps; ++step) {
    const auto begin = Clock::now();
    Stop mine{.signal = interrupt.signal()};
    Batch batch;
    try {
      batch = batches.read(step * config.batch.global);
    } catch (const Error& error) {
      mine.failure = error;
    }
    const Stop stop = agree(world, mine);
    if (stop.failure) throw *stop.failure;
    if (stop.wanted()) throw Interrupted(stop.signal, str("interrupted after ", step, " of ", num_steps, " steps"));
    sum += evaluator.loss(batch) * static_cast<double>(batch.num_counted);
    counted += batch.num_counted;
    const double step_s = std::chrono::duration<double>(Clock::now() - begin).count();
    seconds += step_s;
    pace.add(step_s);
    if (is_first(world))
      progress.show({.done             = step + 1,
                     .total            = num_steps,
                     .loss             = sum / static_cast<double>(std::max<std::int64_t>(1, counted)),
                     .tokens_per_s     = static_cast<double>(batches.tokens_per_step()) / pace.seconds_per_step(),
                     .seconds_per_step = pace.seconds_per_step()});
  }
  progress.clear();
  const double loss           = counted == 0 ? 0 : sum / static_cast<double>(counted);
  const std::int64_t tokens   = num_read(batches, config.batch, num_steps) * config.batch.seq;
  const std::int64_t left_out = num_left_out(batches, config.batch, num_steps);
  const double tokens_per_s   = static_cast<double>(tokens) / seconds;
  const std::string line =
      options.config.json
          ? str("{\"type\":\"eval\",\"loss\":", digits(loss), ",\"perplexity\":", digits(std::exp(loss)),
                ",\"steps\":", num_steps, ",\"tokens\":", tokens, ",\"tokens_left_out\":", left_out,
                ",\"tokens_per_s\":", digits(tokens_per_s), "}")
          : str("loss ", digits(loss), "  perplexity ", short_number(std::exp(loss)), "  (", tokens, " tokens, ",
                short_number(tokens_per_s), " tokens/s", left_out_text(left_out, batches, config.batch, num_steps),
                ")");
  if (is_first(world)) print_line(line);
  if (!std::isfinite(loss)) throw Error(ErrorKind::run, str("loss is ", loss, " (finite weights)"));
}

}  // namespace

void add_eval(Command program) {
  Command command = program.subcommand(
      "eval",
      "Mean loss over eval.data; without it, over the share data.validation, as in training; without "
      "both, over all of the data. Tokens at the end that do not fill a sequence are left out; of "
      "all of the data, also those that do not fill a batch");
  auto options = std::make_shared<EvalOptions>();
  add_config_options(command, options->config, true);
  add_devices_option(command, options->config.devices);
  command.option("--steps", options->steps, "Number of batches (default: all of the data)")
      .between(std::int64_t{1}, std::int64_t{1} << 40);
  add_flight_option(command, options->flight);
  command.footer("Example: stepgraph eval run.json --set 'model={\"load\": \"model\"}' --json");
  command.run([options] {
    const Config config = read(options->config);
    check_offload_here(config);
    in_world({.command = "eval", .flight = options->flight}, config,
             [&](World& world) { run_eval(*options, config, world); });
  });
}

}  // namespace stepgraph::cli
