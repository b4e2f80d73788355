#include "tools/bench/training/pipeline.hpp"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/predict/prediction.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/step/pipeline.hpp"
#include "tools/bench/training/training.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

struct Measured {
  std::vector<double> seconds, bubbles, predictions;  // by step
  double peak_activation = 0;                         // in microbatches of one rank
};

TrainingCase case_of(const PipelineOptions& options, const std::string& schedule) {
  TrainingCase what           = training_case(options.model, str("1x1x", options.stages));
  what.plan.pipeline.schedule = schedule;
  what.batch.global           = what.batch.micro * options.microbatches;
  return what;
}

Measured measure(const PipelineOptions& options, const TrainingCase& what) {
  Training training(what, options.threads);
  training.step();
  Measured out;
  for (int i = 0; i < (options.dry_run ? 1 : options.steps); ++i) {
    Recorder recorder;
    out.seconds.push_back(training.step(&recorder));
    const Timeline timeline = recorder.timeline();
    out.bubbles.push_back(measured_bubble(training.run().step(), timeline));
    out.predictions.push_back(pipeline_bubble(training.run().step(), timeline));
  }
  const auto peaks    = peak_activations(training.run().step().schedule);
  out.peak_activation = *std::max_element(peaks.begin(), peaks.end());
  return out;
}

}  // namespace

void pipeline(const PipelineOptions& options) {
  std::vector<TrainingCase> cases;
  for (const std::string& schedule : options.schedules) {
    cases.push_back(case_of(options, schedule));
    if (schedule != "auto")
      static_cast<void>(schedule_of(cases.back().plan.pipeline, options.stages, options.microbatches));  // throws
  }
  if (!options.json) cli::print_line("schedule      measured bubble   predicted bubble   step ms   peak activation");
  for (const TrainingCase& what : cases) {
    const Measured found   = measure(options, what);
    const double bubble    = quantile(found.bubbles, 0.5);
    const double predicted = quantile(found.predictions, 0.5);
    if (options.json) {
      cli::print_line(json_line({{"type", "pipeline"},
                                 {"model", what.model},
                                 {"schedule", what.plan.pipeline.schedule},
                                 {"stages", options.stages},
                                 {"microbatches", options.microbatches},
                                 {"threads", options.threads},
                                 {"measured_bubble", bubble},
                                 {"predicted_bubble", predicted},
                                 {"step_s", quantile(found.seconds, 0.5)},
                                 {"peak_activation", found.peak_activation}}));
    } else {
      std::ostringstream out;
      out << std::left << std::setw(12) << what.plan.pipeline.schedule << std::right << std::fixed
          << std::setprecision(4) << std::setw(17) << bubble << std::setw(19) << predicted << std::setprecision(2)
          << std::setw(10) << 1e3 * quantile(found.seconds, 0.5) << std::defaultfloat << std::setw(18)
          << found.peak_activation;
      cli::print_line(out.str());
    }
  }
}

}  // namespace stepgraph::bench
