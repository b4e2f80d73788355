#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "engine/run/recorder.hpp"
#include "graphs/train/trainer.hpp"
#include "tools/stepgraph/train/options.hpp"

namespace stepgraph::cli {

class TrainOutput;
struct MeasuredDevice;

// The steps of a run that are recorded: the last one for --trace, and an early one for the line about offload.
// Functions are called in all processes.
class TrainRecording {
 public:
  TrainRecording(Trainer& trainer, const TrainOptions& options, const Config& config,
                 const std::optional<MeasuredDevice>& device, TrainOutput& output)
      : trainer_(trainer), options_(options), config_(config), device_(device), output_(output) {}

  // Steps that run together: one, or those of an asynchronous window.
  struct Steps {
    std::int64_t first = 0;
    std::size_t count  = 0;
    std::int64_t index = 0;  // of `first` among the steps of this process
    std::int64_t total = 0;  // steps of this process
  };
  // For the steps that come next. Null: they are not recorded.
  [[nodiscard]] Recorder* recorder_for(const Steps& steps);
  void note_run(const Steps& steps);  // they have run
  // The line about offload, if these steps are to have it.
  void print_offload(const Steps& steps, bool first_process);
  // The file of --trace and its summary.
  void write_trace();

 private:
  [[nodiscard]] bool traces(const Steps& steps) const;
  [[nodiscard]] bool looks_at_offload(const Steps& steps) const;
  [[nodiscard]] std::string title() const;

  Trainer& trainer_;
  const TrainOptions& options_;
  const Config& config_;
  const std::optional<MeasuredDevice>& device_;
  TrainOutput& output_;
  Recorder recorder_;
  std::size_t steps_recorded_  = 0;  // of the window that recorder_ has; 1: a step; 0: nothing
  std::int64_t first_recorded_ = 0;  // its first step
};

}  // namespace stepgraph::cli
