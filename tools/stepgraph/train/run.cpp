#include "tools/stepgraph/train/run.hpp"

#include <chrono>

#include "engine/base/error.hpp"
#include "graphs/predict/step_report.hpp"
#include "graphs/step/shard_report.hpp"
#include "graphs/train/broadcast_weights.hpp"
#include "tools/stepgraph/processes/together.hpp"
#include "tools/stepgraph/session/plan_text.hpp"
#include "tools/stepgraph/session/session.hpp"
#include "tools/stepgraph/terminal/interrupt.hpp"
#include "tools/stepgraph/train/end.hpp"
#include "tools/stepgraph/train/loop.hpp"
#include "tools/stepgraph/train/parts.hpp"
#include "tools/stepgraph/train/resume.hpp"

namespace stepgraph::cli {
namespace {

void print_plan(TrainParts& parts) {
  std::optional<std::uint64_t> weights_hash;
  if (parts.config.plan.layout.dp > 1) weights_hash = broadcast_weights(parts.trainer.run());
  if (weights_hash == 0) weights_hash.reset();  // each rank has a different part: nothing to compare
  // So that used_bytes() can tell which bytes were written.
  if (parts.options.trace) parts.trainer.run().memory().poison();
  if (parts.json) parts.output.print(str("{\"type\":\"config\",", to_json(parts.config).substr(1)));
  parts.output.print(plan_text(parts.config, parts.trainer.run().step(), step_size(parts.trainer.run()),
                               {.json = parts.json, .weights_hash = weights_hash}));
  if (parts.config.plan.update.mode == UpdateWhen::asynchronous && parts.config.plan.layout.dp > 1)
    parts.output.print_note(
        "update.mode asynchronous: gradients are applied in the order in which they arrive, so a second run has "
        "other results");
  if (parts.resumed) parts.output.print(resume_line(parts.first_step, parts.resumed->path, parts.json));
}

void print_summary(TrainParts& parts, const TrainState& state, double loss, bool interrupted) {
  const StepRun& run = parts.trainer.run();
  if (!is_first(parts.world)) return;
  if (parts.config.plan.shard.strategy != Shard::none && parts.config.plan.layout.dp > 1)
    parts.output.print(
        shard_line(shard_stats(run.step(), run.plan(), Rank{0}), parts.config.plan.shard.strategy, parts.json));
  parts.output.print(summary_line(state, loss, interrupted, parts.json));
}

void run_training(TrainParts& parts, const Interrupt& interrupt) {
  print_plan(parts);
  TrainLoop loop(parts, interrupt);
  if (parts.first_step >= parts.num_steps && parts.resumed) {
    parts.output.print_note(str(parts.resumed->path, " has ", parts.first_step, " steps, and the run ", parts.num_steps,
                                ": nothing is left to do"));
  } else {
    loop.run();
  }
  parts.progress.clear();
  // What took longest to make is saved first. An error of one thing does not stop the others.
  if (!loop.is_flawed()) loop.save_checkpoint();
  parts.checkpoints->finish();
  const bool interrupted = loop.state().steps < parts.num_steps && loop.stop().signal != 0;
  TrainEnd end{.steps = loop.state().steps, .num_steps = parts.num_steps, .failure = loop.failure()};
  if (parts.options.save) save_trained(parts.trainer.run(), *parts.options.save, end);
  try {
    if (parts.options.trace) parts.recording.write_trace();
  } catch (const Error& error) {
    end.no_trace = error;
  }
  print_summary(parts, loop.state(), loop.loss(), interrupted);
  end.signal        = interrupted ? loop.stop().signal : 0;
  end.output_closed = loop.stop().output_closed || parts.output.ends_run();
  end.checkpoint    = parts.checkpoints->path();
  end.no_checkpoint = parts.checkpoints->failure();
  end.no_output     = parts.output.failure();
  end.no_gradients  = loop.no_gradients();
  if (parts.records) end.no_records = parts.records->failure();
  throw_if_flawed(end);
}

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
  TrainParts parts(options, config, start, from, world);
  in_first(world, "checkpoint.folder", [&] {  // the run can begin
    put_aside(from.aside);
    if (from.path.empty() && !config.checkpoint.folder.empty()) forget_start(config.checkpoint.folder);
  });
  run_training(parts, interrupt);
}

}  // namespace stepgraph::cli
