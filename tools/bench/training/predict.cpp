#include "tools/bench/training/predict.hpp"

#include <chrono>
#include <iomanip>
#include <iostream>
#include <memory>
#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/predict/prediction.hpp"
#include "tools/bench/training/training.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {

void predict(const PredictOptions& options) {
  std::vector<TrainingCase> cases;
  for (const std::string& model : options.models) {
    for (const std::string& layout : options.layouts) cases.push_back(training_case(model, layout));
  }
  Calibration calibration;
  if (options.machine) {
    calibration = load_calibration(*options.machine);
    if (calibration.threads != options.threads)
      throw Error(ErrorKind::config, str(*options.machine, ": was measured with ", calibration.threads,
                                         " threads, not ", options.threads, " (--threads ", calibration.threads, ")"));
  } else {
    const auto begin = std::chrono::steady_clock::now();
    calibration      = calibrate([](int ranks) { return std::make_unique<LoopbackWorld>(ranks); },
                            {.threads = options.threads, .steps = options.dry_run ? 1 : 3, .small = options.dry_run});
    std::cerr << "calibration: "
              << cli::short_number(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 3)
              << " s\n";
  }
  if (!options.json) cli::print_line("model  layout   predicted ms   measured ms   predicted / measured");
  for (const TrainingCase& what : cases) {
    const double predicted_s = predict_step(gpt2(what.spec), what.plan, what.batch, calibration).makespan_s();
    Training training(what, options.threads);
    training.step();
    std::vector<double> seconds;
    for (int i = 0; i < (options.dry_run ? 1 : options.steps); ++i) seconds.push_back(training.step());
    const double measured_s = quantile(seconds, 0.5);
    if (options.json) {
      cli::print_line(json_line({{"type", "predict"},
                                 {"model", what.model},
                                 {"layout", what.layout},
                                 {"threads", options.threads},
                                 {"global_batch", what.batch.global},
                                 {"micro_batch", what.batch.micro},
                                 {"predicted_s", predicted_s},
                                 {"measured_s", measured_s},
                                 {"measured_min_s", quantile(seconds, 0)},
                                 {"measured_p95_s", quantile(seconds, 0.95)},
                                 {"ratio", predicted_s / measured_s}}));
    } else {
      std::ostringstream out;
      out << std::left << std::setw(7) << what.model << std::setw(9) << what.layout << std::right << std::fixed
          << std::setprecision(2) << std::setw(12) << 1e3 * predicted_s << std::setw(14) << 1e3 * measured_s
          << std::setprecision(3) << std::setw(23) << predicted_s / measured_s;
      cli::print_line(out.str());
    }
  }
}

}  // namespace stepgraph::bench
