#include "tools/bench/training/predict.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "engine/look/op_times.hpp"
#include "engine/run/recorder.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/predict/prediction.hpp"
#include "tools/bench/training/training.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {

namespace {

Calibration load_machine(const std::string& path, int threads) {
  Calibration loaded = load_calibration(path);
  if (loaded.threads != threads)
    throw Error(ErrorKind::config, str(path, ": was measured with ", loaded.threads, " threads, not ", threads,
                                       " (--threads ", loaded.threads, ")"));
  return loaded;
}

Calibration measure_machine(const PredictOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  Calibration measured =
      calibrate([](int ranks) { return std::make_unique<LoopbackWorld>(ranks); },
                {.threads = options.threads, .steps = options.dry_run ? 1 : 3, .small = options.dry_run});
  std::cerr << "calibration: "
            << cli::short_number(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 3)
            << " s\n";
  return measured;
}

// The time of an op in a step. While n nodes run side by side, each counts for 1/n of the time.
struct KernelTimes {
  std::uint32_t nodes = 0;
  std::vector<double> predicted_s, measured_s;  // by round; by recorded step
};

struct Measures {
  std::vector<double> predicted_s, step_s, ratios;  // by round
  std::vector<double> all_steps_s;                  // of all rounds
  std::map<std::string, KernelTimes> kernels;       // by op; empty unless asked for
};

// By op, of nodes of all kinds.
std::map<std::string, OpTime> kernel_times(const Graph& graph, const Timeline& timeline) {
  std::map<std::string, OpTime> times;
  for (const OpTime& op : op_times(graph, timeline)) {
    times[op.op].num_tasks += op.num_tasks;
    times[op.op].own_s += op.own_s;
  }
  return times;
}

void add_round(const TrainingCase& what, const Calibration& calibration, const PredictOptions& options, Measures& to) {
  const StepPrediction prediction = predict_step(gpt2(what.spec), what.plan, what.batch, calibration);
  to.predicted_s.push_back(prediction.makespan_s());
  Training training(what, options.threads);
  training.step();
  Recorder recorder;
  std::vector<double> seconds;
  for (int i = 0; i < (options.dry_run ? 1 : options.steps); ++i) {
    seconds.push_back(training.step(options.kernels ? &recorder : nullptr));
    if (!options.kernels) continue;
    for (const auto& [op, time] : kernel_times(training.run().step().graph, recorder.timeline()))
      to.kernels[op].measured_s.push_back(time.own_s);
  }
  if (options.kernels) {
    for (const auto& [op, time] : kernel_times(prediction.step.graph, prediction.timeline)) {
      to.kernels[op].nodes = time.num_tasks;
      to.kernels[op].predicted_s.push_back(time.own_s);
    }
  }
  to.step_s.push_back(quantile(seconds, 0.5));
  to.ratios.push_back(to.predicted_s.back() / to.step_s.back());
  to.all_steps_s.insert(to.all_steps_s.end(), seconds.begin(), seconds.end());
}

double median(const std::vector<double>& values) { return values.empty() ? 0 : quantile(values, 0.5); }

// Medians, the longest kernel first.
void print_kernels(const TrainingCase& what, const Measures& measures, const PredictOptions& options) {
  struct Row {
    std::string op;
    std::uint32_t nodes;
    double predicted_s, measured_s;
  };
  std::vector<Row> rows;
  for (const auto& [op, times] : measures.kernels)
    rows.push_back({op, times.nodes, median(times.predicted_s), median(times.measured_s)});
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.measured_s > b.measured_s; });
  for (const Row& row : rows) {
    if (options.json) {
      cli::print_line(json_line({{"type", "predict_kernel"},
                                 {"model", what.model},
                                 {"layout", what.layout},
                                 {"threads", options.threads},
                                 {"op", row.op},
                                 {"nodes", row.nodes},
                                 {"predicted_s", row.predicted_s},
                                 {"measured_s", row.measured_s}}));
      continue;
    }
    std::ostringstream out;
    out << "  " << std::left << std::setw(38) << row.op << std::right << std::setw(8) << row.nodes << std::fixed
        << std::setprecision(3) << std::setw(15) << 1e3 * row.predicted_s << std::setw(14) << 1e3 * row.measured_s;
    if (row.measured_s > 0) out << std::setprecision(2) << std::setw(8) << row.predicted_s / row.measured_s;
    cli::print_line(out.str());
  }
}

void print(const TrainingCase& what, const Measures& measures, const PredictOptions& options) {
  const double predicted_s = quantile(measures.predicted_s, 0.5), measured_s = quantile(measures.step_s, 0.5),
               ratio = quantile(measures.ratios, 0.5);
  if (options.json) {
    cli::print_line(json_line({{"type", "predict"},
                               {"model", what.model},
                               {"layout", what.layout},
                               {"threads", options.threads},
                               {"global_batch", what.batch.global},
                               {"micro_batch", what.batch.micro},
                               {"rounds", options.rounds},
                               {"predicted_s", predicted_s},
                               {"measured_s", measured_s},
                               {"measured_min_s", quantile(measures.all_steps_s, 0)},
                               {"measured_p95_s", quantile(measures.all_steps_s, 0.95)},
                               {"ratio", ratio}}));
    return;
  }
  std::ostringstream out;
  out << std::left << std::setw(7) << what.model << std::setw(9) << what.layout << std::right << std::fixed
      << std::setprecision(2) << std::setw(12) << 1e3 * predicted_s << std::setw(14) << 1e3 * measured_s
      << std::setprecision(3) << std::setw(23) << ratio;
  cli::print_line(out.str());
}

}  // namespace

void predict(const PredictOptions& options) {
  std::vector<TrainingCase> cases;
  for (const std::string& model : options.models) {
    for (const std::string& layout : options.layouts) cases.push_back(training_case(model, layout));
  }
  std::vector<Measures> measures(cases.size());
  Calibration calibration;
  if (options.machine) calibration = load_machine(*options.machine, options.threads);
  for (int round = 0; round < options.rounds; ++round) {
    if (!options.machine) calibration = measure_machine(options);
    if (round == 0 && !options.json)
      cli::print_line(str(
          "model  layout   predicted ms   measured ms   predicted / measured",
          options.kernels ? "\n  kernel                                   nodes   predicted ms   measured ms   ratio"
                          : ""));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      add_round(cases[i], calibration, options, measures[i]);
      if (round + 1 < options.rounds) continue;
      print(cases[i], measures[i], options);
      print_kernels(cases[i], measures[i], options);
    }
  }
}

}  // namespace stepgraph::bench
