#pragma once
#include <cstdint>
#include <optional>

#include "engine/simulate/machine.hpp"
#include "graphs/files/batches.hpp"
#include "graphs/train/checkpoint.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/logs/train_records.hpp"
#include "tools/stepgraph/session/measured_device.hpp"
#include "tools/stepgraph/terminal/progress.hpp"
#include "tools/stepgraph/train/checkpoints.hpp"
#include "tools/stepgraph/train/eval.hpp"
#include "tools/stepgraph/train/lines.hpp"
#include "tools/stepgraph/train/options.hpp"
#include "tools/stepgraph/train/recording.hpp"
#include "tools/stepgraph/train/step_lines.hpp"

namespace stepgraph::cli {

struct ResumeFrom;
struct Start;

// What a training run is made of. The constructor makes the trainer and gives it its weights: those of `start`, or of a
// checkpoint. Collective. Throws Error.
struct TrainParts {
  TrainParts(const TrainOptions& of, const Config& from_file, const Start& start, const ResumeFrom& from, World& in);
  TrainParts(const TrainParts&)            = delete;
  TrainParts& operator=(const TrainParts&) = delete;

  const TrainOptions& options;
  const Config& config;
  World& world;
  const bool json = options.config.json;
  Batches batches;
  std::optional<Machine> machine;  // comm.machine
  std::optional<MeasuredDevice> device;
  Trainer trainer;
  std::optional<Resumed> resumed;
  std::int64_t first_step     = 0;  // of this process: not 0 for a run that was resumed
  std::int64_t first_sequence = 0;  // of the data, of the first step
  std::int64_t num_steps      = 0;  // in all
  Progress progress{{.what = "train", .log_lines = 0}};
  TrainOutput output;
  TrainRecording recording{trainer, options, config, device, output};
  std::optional<TrainRecords> records;  // in process 0
  std::optional<StepLines> lines;
  std::optional<TrainEval> eval;
  std::optional<TrainCheckpoints> checkpoints;
};

}  // namespace stepgraph::cli
