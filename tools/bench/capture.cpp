#include "tools/bench/capture.hpp"

#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "engine/error.hpp"
#include "engine/quantile.hpp"
#include "tools/bench/idle.hpp"
#include "tools/bench/training.hpp"
#include "tools/stepgraph/output.hpp"

namespace stepgraph::bench {
namespace {

// Steps in a row while the device's activity is recorded, which takes time itself: with it they idle no less.
struct Traced {
  std::vector<double> seconds;
  Idle idle;
  [[nodiscard]] double busy_s() const { return idle.busy_s / static_cast<double>(seconds.size()); }  // of a step
};

struct Measured {
  std::vector<double> seconds, issue_seconds;
  std::optional<Traced> traced;
  std::string why_not_traced;
};

#ifdef STEPGRAPH_WITH_CUDA
// A figure less where activity cannot be recorded; a step that fails is a failure.
void trace(Training& training, int steps, Measured& out) {
  const auto recorded = [&](const auto& with_cupti) {
    try {
      with_cupti();
      return true;
    } catch (const Error& error) {
      out.why_not_traced = error.what();
      return false;
    }
  };
  std::optional<CudaActivity> activity;
  if (!recorded([&] { activity.emplace(); })) return;
  training.step();  // the first one that is recorded is slower
  if (!recorded([&] { static_cast<void>(activity->take()); })) return;
  Traced traced;
  for (int i = 0; i < steps; ++i) traced.seconds.push_back(training.step());
  if (!recorded([&] { traced.idle = idle_of(activity->take()); })) return;
  if (traced.idle.num_intervals == 0) {
    out.why_not_traced = "cupti: nothing was recorded";
    return;
  }
  out.traced = std::move(traced);
}
#else
void trace(Training&, int, Measured&) {}
#endif

Measured measure(const TrainingCase& what, const CaptureOptions& options, bool captures) {
  Training training(what, options.threads, options.backend, {.capture = captures});
  const int steps = options.dry_run ? 1 : options.steps;
  for (int i = 0; i < 3; ++i) training.step();  // as it is, captured, replayed
  Measured out;
  for (int i = 0; i < steps; ++i) {
    out.seconds.push_back(training.step());
    out.issue_seconds.push_back(training.run().program().issue_s());
  }
  if (options.backend == "loopback") {
    out.why_not_traced = "no device";
    return out;
  }
  trace(training, std::min(steps, 10), out);
  return out;
}

struct Line {
  const TrainingCase& what;
  bool captures;
  const Measured& measured;
};

void print_json(const Line& line, const CaptureOptions& options) {
  const Measured& measured    = line.measured;
  const double step_s         = quantile(measured.seconds, 0.5);
  nlohmann::ordered_json json = {{"type", "capture"},
                                 {"model", line.what.model},
                                 {"layout", line.what.layout},
                                 {"backend", options.backend},
                                 {"capture", line.captures},
                                 {"steps", measured.seconds.size()},
                                 {"step_ms", 1e3 * step_s},
                                 {"step_p95_ms", 1e3 * quantile(measured.seconds, 0.95)},
                                 {"tokens_per_s", static_cast<double>(line.what.tokens()) / step_s}};
  for (const char* field : {"issue_ms", "issue_p95_ms", "traced_steps", "traced_step_ms", "activities_per_step",
                            "busy_ms", "idle_share", "idle_estimate", "longest_gap_us", "why_not_traced"})
    json[field] = nullptr;
  if (options.backend != "loopback") {
    json["issue_ms"]     = 1e3 * quantile(measured.issue_seconds, 0.5);
    json["issue_p95_ms"] = 1e3 * quantile(measured.issue_seconds, 0.95);
  }
  if (measured.traced) {
    const auto steps            = static_cast<double>(measured.traced->seconds.size());
    json["traced_steps"]        = measured.traced->seconds.size();
    json["traced_step_ms"]      = 1e3 * quantile(measured.traced->seconds, 0.5);
    json["activities_per_step"] = static_cast<double>(measured.traced->idle.num_intervals) / steps;
    json["busy_ms"]             = 1e3 * measured.traced->busy_s();
    json["idle_estimate"]       = 1 - measured.traced->busy_s() / step_s;
    json["idle_share"]          = measured.traced->idle.share();
    json["longest_gap_us"]      = 1e6 * measured.traced->idle.longest_gap_s;
  } else {
    json["why_not_traced"] = measured.why_not_traced;
  }
  cli::print_line(json.dump());
}

void print_text(const Line& line, const CaptureOptions& options) {
  const Measured& measured = line.measured;
  std::ostringstream out;
  out << std::fixed << std::setprecision(2) << line.what.model << ' ' << line.what.layout << ", "
      << (line.captures ? "captured" : "node by node") << ": a step " << 1e3 * quantile(measured.seconds, 0.5)
      << " ms (p95 " << 1e3 * quantile(measured.seconds, 0.95) << ")";
  if (options.backend != "loopback") {
    out << ", enqueued in " << std::setprecision(3) << 1e3 * quantile(measured.issue_seconds, 0.5) << " ms (p95 "
        << 1e3 * quantile(measured.issue_seconds, 0.95) << ")";
  }
  if (measured.traced) {
    const Traced& traced = *measured.traced;
    out << "\n  the device idles for at most " << std::setprecision(2) << 100 * traced.idle.share()
        << "% of the time (about " << 100 * (1 - traced.busy_s() / quantile(measured.seconds, 0.5))
        << "% while nobody looks), at most " << std::setprecision(0) << 1e6 * traced.idle.longest_gap_s
        << " us at once (" << traced.seconds.size() << " steps in a row while " << std::setprecision(1)
        << static_cast<double>(traced.idle.num_intervals) / static_cast<double>(traced.seconds.size())
        << " kernels, copies and fills a step were recorded, with which a step takes " << std::setprecision(2)
        << 1e3 * quantile(traced.seconds, 0.5) << " ms)";
  } else {
    out << "\n  how long the device idles is not known: " << measured.why_not_traced;
  }
  cli::print_line(out.str());
}

}  // namespace

void capture(const CaptureOptions& options) {
  std::vector<TrainingCase> cases;  // what cannot be done is said before anything is measured
  for (const std::string& model : options.models) {
    for (const std::string& layout : options.layouts) cases.push_back(training_case(model, layout));
  }
  for (const TrainingCase& what : cases) {
    for (const bool captures : {true, false}) {
      if (captures && options.backend == "loopback") continue;
      const Measured measured = measure(what, options, captures);
      const Line line{what, captures, measured};
      options.json ? print_json(line, options) : print_text(line, options);
    }
  }
}

}  // namespace stepgraph::bench
