#include "tools/stepgraph/train/parts.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "engine/base/error.hpp"
#include "graphs/step/asynchronous.hpp"
#include "tools/stepgraph/processes/together.hpp"
#include "tools/stepgraph/session/search_line.hpp"
#include "tools/stepgraph/session/session.hpp"
#include "tools/stepgraph/train/resume.hpp"

namespace stepgraph::cli {
namespace {

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

}  // namespace

TrainParts::TrainParts(const TrainOptions& of, const Config& from_file, const Start& start, const ResumeFrom& from,
                       World& in)
    : options(of),
      config(from_file),
      world(in),
      batches(make_batches(config, start.model.vocab)),
      machine(chooser_machine(config)),
      device(measured_device(config)),
      trainer(make_trainer(options, config, start, batches, world, pointer_to(machine), device)),
      output(progress, {.json = json, .has_files = writes_files(options, config), .prints = is_first(world)}) {
  if (from.path.empty()) {
    set_weights(trainer.run(), start, config.seed);
  } else {
    resumed = load_resumed(trainer, from, options, config, batches, world);
  }
  const CheckpointState done = resumed ? resumed->state : CheckpointState{};
  first_step                 = done.steps;
  first_sequence             = done.position;
  num_steps                  = choose_steps(batches, options.steps, {.steps = done.steps, .sequences = done.position});
  trainer.set_total_steps(num_steps);
  if (resumed && is_first(world)) compare_schedules(done, config, num_steps);
  if (done.waiting && done.waiting->num_sets > 0 && !config.plan.update.delays())
    output.print_note(str(resumed->path, ": ", done.waiting->num_sets, done.waiting->num_sets == 1 ? " set" : " sets",
                          " of gradients that wait for their update are dropped: update.mode is ",
                          config.plan.update.mode));
  eval.emplace(trainer, config, start.model.vocab);
  checkpoints.emplace(trainer, config, output, done.steps, resumed ? resumed->path : std::string());
  in_first(world, "log files", [&] {
    records.emplace(progress, TrainRecords::Targets{.log = options.log, .tensorboard = options.tensorboard},
                    done.steps);
  });
  // A terminal has the status line instead of lines for all steps.
  const bool status = !json && progress.has_terminal() && isatty(STDOUT_FILENO) == 1;
  lines.emplace(output, records ? &*records : nullptr,
                StepLines::Options{.every = options.log_every.value_or(status ? 0 : 1), .json = json});
}

}  // namespace stepgraph::cli
