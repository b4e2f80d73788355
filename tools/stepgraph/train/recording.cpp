#include "tools/stepgraph/train/recording.hpp"

#include "engine/base/error.hpp"
#include "graphs/predict/step_report.hpp"
#include "graphs/step/offload/idle_settings.hpp"
#include "tools/stepgraph/session/measured_device.hpp"
#include "tools/stepgraph/session/step_summary.hpp"
#include "tools/stepgraph/train/lines.hpp"

namespace stepgraph::cli {

// Of an asynchronous run the longest window is kept, and of these the last.
bool TrainRecording::traces(const Steps& steps) const { return options_.trace && steps.count >= steps_recorded_; }

// The second step is recorded, or the only one: the first step can be slower.
bool TrainRecording::looks_at_offload(const Steps& steps) const {
  return config_.plan.offload.moves_something() && steps.index == (steps.total == 1 ? 0 : 1);
}

Recorder* TrainRecording::recorder_for(const Steps& steps) {
  return traces(steps) || looks_at_offload(steps) ? &recorder_ : nullptr;
}

void TrainRecording::note_run(const Steps& steps) {
  if (!traces(steps)) return;
  steps_recorded_ = steps.count;
  first_recorded_ = steps.first;
}

void TrainRecording::print_offload(const Steps& steps, bool first_process) {
  if (!looks_at_offload(steps)) return;
  const OffloadFigures figures = offload_figures(trainer_.run(), recorder_.timeline());
  std::optional<PredictedStep> predicted;
  if (device_ && first_process) {
    try {
      const StepRun& run = trainer_.run();
      predicted          = predicted_step(run.step().graph, run.plan(), device_->machine);
    } catch (const Error& error) {
      output_.print_note(str("the step is not predicted: ", error.what()));
    }
  }
  const bool json        = options_.config.json;
  const std::string line = offload_line(figures, config_.plan.offload, predicted, json);
  json ? output_.print(line) : output_.print_note(line);
  const std::string idle = idle_settings_text(config_.plan.offload, use_of(figures.units));
  if (!idle.empty() && first_process) output_.print_note(idle);
}

// The step or window that was recorded.
std::string TrainRecording::title() const {
  if (steps_recorded_ == 1) return str("step ", first_recorded_);
  return str("a window of ", steps_recorded_, " steps, from step ", first_recorded_);
}

void TrainRecording::write_trace() {
  if (steps_recorded_ == 0) {
    output_.print_note(str(*options_.trace, ": no trace is written, because no step has run"));
    return;
  }
  write_step_trace(trainer_.recorded(), recorder_, *options_.trace, {.title = title()});
  const StepFigures figures = step_figures(trainer_.recorded(), recorder_.timeline());
  output_.print(options_.config.json ? to_json(figures) : to_text(figures));
}

}  // namespace stepgraph::cli
