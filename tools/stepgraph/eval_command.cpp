#include <chrono>
#include <cmath>
#include <memory>

#include "engine/base/error.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/interrupt.hpp"
#include "tools/stepgraph/output.hpp"
#include "tools/stepgraph/progress.hpp"
#include "tools/stepgraph/session.hpp"
#include "tools/stepgraph/together.hpp"
#include "tools/stepgraph/worlds.hpp"

namespace stepgraph::cli {
namespace {

struct EvalOptions {
  ConfigOptions config;
  std::optional<std::int64_t> steps;
  std::optional<std::string> flight;
};

// "; the last 8 tokens, too few for a batch, are left out"
std::string left_out_text(const Batches& batches) {
  const std::int64_t tokens = batches.num_left_out();
  if (tokens == 0) return "";
  return str("; the last ", tokens, tokens == 1 ? " token" : " tokens",
             batches.ends_with_data() ? ", too few for a batch," : "", tokens == 1 ? " is" : " are", " left out");
}

void run_eval(const EvalOptions& options, const Config& config, World& world) {
  require_same_job(world, config, option_text("--steps", options.steps));
  if (is_first(world)) warn_about_threads(config.threads);
  const Start start = make_start(config, is_first(world));
  Batches batches(config, start.model.vocab, options.steps);
  const std::optional<Machine> machine = chooser_machine(config);
  Evaluator evaluator(start.model, config.plan, config.batch, world,
                      {.threads       = threads_here(world, config.threads),
                       .stall_timeout = stall_timeout(config, world),
                       .reuse         = config.plan.reuse,
                       .machine       = pointer_to(machine)});
  set_weights(evaluator.run(), start, config.seed);

  using Clock = std::chrono::steady_clock;
  const Interrupt interrupt;
  Progress progress({.what = "eval", .log_lines = options.config.json ? 0 : 10});
  Pace pace;
  double sum = 0, seconds = 0;
  for (std::int64_t step = 0; step < batches.num_steps(); ++step) {
    const auto begin = Clock::now();
    Stop mine{.signal = interrupt.signal()};
    std::span<const std::int32_t> tokens;
    try {
      tokens = batches.read(step);
    } catch (const Error& error) {
      mine.failure = error;
    }
    const Stop stop = agree(world, mine);
    if (stop.failure) throw *stop.failure;
    if (stop.wanted())
      throw Interrupted(stop.signal, str("interrupted after ", step, " of ", batches.num_steps(), " steps"));
    sum += evaluator.loss(tokens);
    const double step_s = std::chrono::duration<double>(Clock::now() - begin).count();
    seconds += step_s;
    pace.add(step_s);
    if (is_first(world))
      progress.show({.done             = step + 1,
                     .total            = batches.num_steps(),
                     .loss             = sum / static_cast<double>(step + 1),
                     .tokens_per_s     = static_cast<double>(batches.tokens_per_step()) / pace.seconds_per_step(),
                     .seconds_per_step = pace.seconds_per_step()});
  }
  progress.clear();
  const double loss         = sum / static_cast<double>(batches.num_steps());
  const std::int64_t tokens = batches.num_steps() * batches.tokens_per_step();
  const double tokens_per_s = static_cast<double>(tokens) / seconds;
  const std::string line =
      options.config.json
          ? str("{\"type\":\"eval\",\"loss\":", digits(loss), ",\"perplexity\":", digits(std::exp(loss)),
                ",\"steps\":", batches.num_steps(), ",\"tokens\":", tokens,
                ",\"tokens_left_out\":", batches.num_left_out(), ",\"tokens_per_s\":", digits(tokens_per_s), "}")
          : str("loss ", digits(loss), "  perplexity ", short_number(std::exp(loss)), "  (", tokens, " tokens, ",
                short_number(tokens_per_s), " tokens/s", left_out_text(batches), ")");
  if (is_first(world)) print_line(line);
  if (!std::isfinite(loss)) throw Error(ErrorKind::run, str("loss is ", loss, " (finite weights)"));
}

}  // namespace

void add_eval(Command program) {
  Command command =
      program.subcommand("eval", "Mean loss over the data. Tokens at the end that do not fill a batch are left out");
  auto options = std::make_shared<EvalOptions>();
  add_config_options(command, options->config, true);
  command.option("--steps", options->steps, "Number of batches (default: all of the data)")
      .between(std::int64_t{1}, std::int64_t{1} << 40);
  add_flight_option(command, options->flight);
  command.footer("Example: stepgraph eval run.json --set 'model={\"load\": \"model\"}' --json");
  command.run([options] {
    const Config config = read(options->config);
    in_world({.command = "eval", .flight = options->flight}, config,
             [&](World& world) { run_eval(*options, config, world); });
  });
}

}  // namespace stepgraph::cli
