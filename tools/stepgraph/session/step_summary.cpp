#include "tools/stepgraph/session/step_summary.hpp"

#include "engine/base/error.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {

std::string to_text(const StepFigures& summary) {
  const auto percent = [](double share) { return str(short_number(100 * share, 3), "%"); };
  const auto mib     = [](std::int64_t bytes) { return short_number(static_cast<double>(bytes) / (1 << 20), 4); };
  return str("last step: ", short_number(1e3 * summary.step_s, 3), " ms, workers busy ", percent(summary.workers_busy),
             ", communication hidden ", percent(summary.hidden), "\npipeline bubble ", percent(summary.bubble),
             " with a device for each rank (simulated with the times measured)\npeak memory of a rank: planned ",
             mib(summary.planned_bytes), " MiB, used ", mib(summary.used_bytes), " MiB");
}

std::string to_json(const StepFigures& summary) {
  return str("{\"type\":\"last_step\",\"seconds\":", digits(summary.step_s),
             ",\"workers_busy\":", digits(summary.workers_busy), ",\"communication_hidden\":", digits(summary.hidden),
             ",\"bubble_rate\":", digits(summary.bubble), ",\"planned_bytes\":", summary.planned_bytes,
             ",\"used_bytes\":", summary.used_bytes, "}");
}

}  // namespace stepgraph::cli
