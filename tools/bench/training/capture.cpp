#include "tools/bench/training/capture.hpp"

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <optional>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/base/quantile.hpp"
#include "graphs/files/json_value.hpp"
#include "tools/bench/training/idle.hpp"
#include "tools/bench/training/training.hpp"
#include "tools/stepgraph/processes/worlds.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::bench {
namespace {

// Consecutive steps with recorded device activity. Recording takes time, so the idle share is an upper bound.
struct Traced {
  std::vector<double> seconds;
  Idle idle;
  [[nodiscard]] double busy_s() const { return idle.busy_s / static_cast<double>(seconds.size()); }  // of a step
};

// The measurements of one way of enqueuing.
struct Measured {
  bool captures                     = false;
  std::vector<double> seconds       = {};
  std::vector<double> issue_seconds = {};
  std::optional<Traced> traced      = {};
  std::string why_not_traced        = "no device";
};

class Bench {
 public:
  explicit Bench(const CaptureOptions& options)
      : options_(options),
        what_(training_case(options.model, options.layout)),
        training_(what_, 1, options.backend),
        on_device_(training_.world().device() != nullptr),
        steps_(options.dry_run ? 1 : options.steps) {
    if (on_device_) ways_.push_back({.captures = true});
    ways_.push_back({.captures = false});
  }

  void run() {
    for (Measured& way : ways_) {
      for (int i = 0; i < 3; ++i) step(way);  // first run, capture, replay
    }
    for (int i = 0; i < steps_; ++i) {
      for (Measured& way : ways_) {
        way.seconds.push_back(step(way));
        way.issue_seconds.push_back(training_.run().program().issue_s());
      }
    }
    if (on_device_) {
      for (const Measured& way : ways_) {
        std::cerr << what_.model << (way.captures ? " captured: " : " node by node: ")
                  << cli::short_number(1e3 * quantile(way.seconds, 0.5), 4) << " ms a step; now with CUPTI\n";
      }
      trace();
    }
    for (const Measured& way : ways_) options_.json ? print_json(way) : print_text(way);
  }

 private:
  double step(const Measured& way) {
    cli::set_capture(training_.world(), way.captures);
    return training_.step();
  }

#ifdef STEPGRAPH_WITH_CUDA
  // Without CUPTI the idle figures are missing. A step that fails is an error.
  void trace() {
    const auto recorded = [&](const auto& with_cupti) {
      try {
        with_cupti();
        return true;
      } catch (const Error& error) {
        for (Measured& way : ways_) way.why_not_traced = error.what();
        return false;
      }
    };
    std::optional<CudaActivity> activity;
    if (!recorded([&] { activity.emplace(); })) return;
    for (Measured& way : ways_) {
      step(way);  // the first recorded step is slower
      if (!recorded([&] { static_cast<void>(activity->take()); })) return;
      Traced traced;
      for (int i = 0; i < std::min(steps_, 10); ++i) traced.seconds.push_back(step(way));
      const bool done = recorded([&] {
        traced.idle = idle_of(activity->take());
        if (traced.idle.num_intervals == 0) throw Error(ErrorKind::backend, "cupti: nothing was recorded");
      });
      if (!done) return;
      way.traced = std::move(traced);
    }
  }
#else
  void trace() {}
#endif

  void print_json(const Measured& measured) const {
    const double step_s = quantile(measured.seconds, 0.5);
    JsonValue json      = {{"type", "capture"},
                           {"model", what_.model},
                           {"layout", what_.layout},
                           {"backend", options_.backend},
                           {"capture", measured.captures},
                           {"steps", measured.seconds.size()},
                           {"step_ms", 1e3 * step_s},
                           {"step_p95_ms", 1e3 * quantile(measured.seconds, 0.95)},
                           {"tokens_per_s", static_cast<double>(what_.tokens()) / step_s}};
    for (const char* field : {"issue_ms", "issue_p95_ms", "traced_steps", "traced_step_ms", "activities_per_step",
                              "busy_ms", "idle_share", "idle_estimate", "longest_gap_us", "why_not_traced"})
      json.set(field, nullptr);
    if (on_device_) {
      json.set("issue_ms", 1e3 * quantile(measured.issue_seconds, 0.5));
      json.set("issue_p95_ms", 1e3 * quantile(measured.issue_seconds, 0.95));
    }
    if (measured.traced) {
      const auto steps = static_cast<double>(measured.traced->seconds.size());
      json.set("traced_steps", measured.traced->seconds.size());
      json.set("traced_step_ms", 1e3 * quantile(measured.traced->seconds, 0.5));
      json.set("activities_per_step", static_cast<double>(measured.traced->idle.num_intervals) / steps);
      json.set("busy_ms", 1e3 * measured.traced->busy_s());
      json.set("idle_estimate", 1 - measured.traced->busy_s() / step_s);
      json.set("idle_share", measured.traced->idle.share());
      json.set("longest_gap_us", 1e6 * measured.traced->idle.longest_gap_s);
    } else {
      json.set("why_not_traced", measured.why_not_traced);
    }
    cli::print_line(json_line(json));
  }

  void print_text(const Measured& measured) const {
    std::ostringstream out;
    out << std::fixed << std::setprecision(2) << what_.model << ' ' << what_.layout << ", "
        << (measured.captures ? "captured" : "node by node") << ": a step " << 1e3 * quantile(measured.seconds, 0.5)
        << " ms (p95 " << 1e3 * quantile(measured.seconds, 0.95) << ")";
    if (on_device_) {
      out << ", enqueued in " << std::setprecision(3) << 1e3 * quantile(measured.issue_seconds, 0.5) << " ms (p95 "
          << 1e3 * quantile(measured.issue_seconds, 0.95) << ")";
    }
    if (measured.traced) {
      const Traced& traced = *measured.traced;
      out << "\n  the device is idle for at most " << std::setprecision(2) << 100 * traced.idle.share()
          << "% of the time (about " << 100 * (1 - traced.busy_s() / quantile(measured.seconds, 0.5))
          << "% without recording), for at most " << std::setprecision(0) << 1e6 * traced.idle.longest_gap_s
          << " us at a time (recorded over " << traced.seconds.size() << " consecutive steps with "
          << std::setprecision(1)
          << static_cast<double>(traced.idle.num_intervals) / static_cast<double>(traced.seconds.size())
          << " kernels, copies and fills per step; a recorded step takes " << std::setprecision(2)
          << 1e3 * quantile(traced.seconds, 0.5) << " ms)";
    } else {
      out << "\n  the idle time of the device is not known: " << measured.why_not_traced;
    }
    cli::print_line(out.str());
  }

  const CaptureOptions& options_;
  TrainingCase what_;
  Training training_;
  bool on_device_;
  int steps_;
  std::vector<Measured> ways_;
};

}  // namespace

void capture(const CaptureOptions& options) { Bench(options).run(); }

}  // namespace stepgraph::bench
