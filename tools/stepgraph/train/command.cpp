#include <iostream>
#include <memory>
#include <utility>

#include "engine/base/error.hpp"
#include "engine/base/output_folder.hpp"
#include "tools/stepgraph/commands.hpp"
#include "tools/stepgraph/processes/together.hpp"
#include "tools/stepgraph/processes/worlds.hpp"
#include "tools/stepgraph/session/config_options.hpp"
#include "tools/stepgraph/session/session.hpp"
#include "tools/stepgraph/session/targets.hpp"
#include "tools/stepgraph/train/run.hpp"

namespace stepgraph::cli {
namespace {

// Checks that the results can be saved, before the training begins.
void check_targets(const TrainOptions& options) {
  for (const auto& [what, target] : {std::pair("--save", &options.save), std::pair("--dump-grads", &options.dump_grads),
                                     std::pair("--trace", &options.trace), std::pair("--log", &options.log),
                                     std::pair("--tensorboard", &options.tensorboard)}) {
    if (*target == "-")
      throw Error(ErrorKind::config,
                  str(what, " -: stdout is for the results (a ",
                      target == &options.save || target == &options.tensorboard ? "folder" : "file", " name)"));
  }
  if ((options.dump_grads || options.trace) && options.steps == 0)
    throw Error(ErrorKind::config, "--steps 0: --dump-grads and --trace need a step (1 or more)");
  if (options.dump_grads && options.dump_grads == options.trace)
    throw Error(ErrorKind::config, str("--dump-grads and --trace: both write ", *options.trace, " (two files)"));
  for (const auto& [what, other] :
       {std::pair("--dump-grads", &options.dump_grads), std::pair("--trace", &options.trace)})
    if (options.log && *other == options.log)
      throw Error(ErrorKind::config, str(what, " and --log: both write ", *options.log, " (two files)"));
  check_target("--dump-grads", options.dump_grads, FileKind::safetensors, options.force);
  check_target("--trace", options.trace, FileKind::trace, options.force);
  check_target("--log", options.log, FileKind::log, options.force);
  check_model_target("--save", options.save, options.force);
  if (!options.save) return;
  for (const std::string& left : interrupted_folders(*options.save))
    std::cerr << "stepgraph train: " << left << ": left by an interrupted save (remove it if it is not needed)\n";
}

void run_train(const TrainOptions& options) {
  const Config config = read(options.config);
  check_offload_here(config);
  WorldOptions world_options{.command = "train", .flight = options.flight};
  for (const auto* target : {&options.save, &options.dump_grads, &options.trace, &options.log})
    if (*target) world_options.to_write.push_back(**target);
  in_world(world_options, config, [&](World& world) {
    require_same_job(world, config,
                     str(option_text("--steps", options.steps), option_text("--save", options.save),
                         option_text("--dump-grads", options.dump_grads), option_text("--trace", options.trace),
                         option_text("--resume", options.resume), option_text("--log", options.log),
                         option_text("--tensorboard", options.tensorboard)),
                     !options.resumes());
    in_first(world, "files to write", [&] {
      warn_about_threads(config.threads);
      check_targets(options);
    });
    train_in(world, options, config);
  });
}

}  // namespace

void add_train(Command program) {
  Command command = program.subcommand("train",
                                       "Train a model. Prints a line for each step with loss, gradient norm and "
                                       "speed; on a terminal, one line that is updated");
  auto options    = std::make_shared<TrainOptions>();
  add_config_options(command, options->config, true);
  add_devices_option(command, options->config.devices);
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
  command.optional_value(
      "--resume", options->resume, "PATH",
      "Continue from the newest whole checkpoint in checkpoint.folder, or from PATH: a checkpoint, or a folder of "
      "them. An empty folder starts at step 0. After CONFIG, or as --resume=PATH. --steps is the total");
  command.option("--log", options->log,
                 "Write a line for each step and each evaluation to this file: CSV if it ends with .csv, else JSON "
                 "lines. A resumed run continues it");
  command.option("--tensorboard", options->tensorboard, "Write an event file for TensorBoard into this folder");
  command.flag("--restarted", options->restarted, "launch has started this run again").hidden();
  command.flag("--restartable", options->restartable, "launch will start this run again").hidden();
  add_flight_option(command, options->flight);
  add_force(command, options->force,
            ". Without --resume: put checkpoints in checkpoint.folder aside, and begin at step 0. With --resume: go on "
            "although shuffled data has another order");
  command.footer(
      "SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1 stop the run after the current step: a checkpoint and the model "
      "are "
      "saved, and the exit code is 130, 143, 129 or 138. A second SIGINT, SIGTERM or SIGUSR1, a second or more later, "
      "stops it at once. If the loss or the gradient norm is not finite, or the data ends early, the run ends and "
      "saves "
      "its weights. A step whose gradient norm is not finite has not changed them. Exception: offload.optimizer with "
      "offload.overlap and optimizer.clip 0 can update weights before the norm is known; then they are not saved.\n"
      "Example: stepgraph train run.json --set layout.dp=2 --steps 100 --save model --json\n"
      "Example: stepgraph train run.json --set checkpoint.folder=checkpoints --set checkpoint.every=100 --resume");
  command.run([options] { run_train(*options); });
}

}  // namespace stepgraph::cli
