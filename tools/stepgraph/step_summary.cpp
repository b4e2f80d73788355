#include "tools/stepgraph/step_summary.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "engine/look/analysis.hpp"
#include "graphs/predict/prediction.hpp"
#include "tools/stepgraph/output.hpp"

namespace stepgraph::cli {

StepSummary summarize_step(const StepRun& run, const Timeline& timeline) {
  const StepGraph& step = run.step();
  StepSummary summary{.step_s = timeline.makespan_s};
  const auto workers = busy_workers(timeline);
  for (const WorkerBusy& worker : workers) summary.workers_busy += worker.share / static_cast<double>(workers.size());
  HiddenCommunication all;
  for (const HiddenCommunication& rank : hidden_communication(step.graph, timeline)) {
    all.communicate_s += rank.communicate_s;
    all.hidden_s += rank.hidden_s;
  }
  summary.hidden = all.share();
  summary.bubble = pipeline_bubble(step, timeline);
  for (int rank = 0; rank < step.layout.num_ranks(); ++rank) {
    summary.planned_bytes = std::max(summary.planned_bytes, run.memory().size_bytes(Rank{rank}));
    summary.used_bytes    = std::max(summary.used_bytes, run.memory().used_bytes(Rank{rank}));
  }
  return summary;
}

std::string to_text(const StepSummary& summary) {
  const auto percent = [](double share) { return str(short_number(100 * share, 3), "%"); };
  const auto mib     = [](std::int64_t bytes) { return short_number(static_cast<double>(bytes) / (1 << 20), 4); };
  return str("last step: ", short_number(1e3 * summary.step_s, 3), " ms, workers busy ", percent(summary.workers_busy),
             ", communication hidden ", percent(summary.hidden), "\npipeline bubble ", percent(summary.bubble),
             " with a device for each rank (simulated with the times measured)\npeak memory of a rank: planned ",
             mib(summary.planned_bytes), " MiB, used ", mib(summary.used_bytes), " MiB");
}

std::string to_json(const StepSummary& summary) {
  return str("{\"type\":\"last_step\",\"seconds\":", digits(summary.step_s),
             ",\"workers_busy\":", digits(summary.workers_busy), ",\"communication_hidden\":", digits(summary.hidden),
             ",\"bubble_rate\":", digits(summary.bubble), ",\"planned_bytes\":", summary.planned_bytes,
             ",\"used_bytes\":", summary.used_bytes, "}");
}

}  // namespace stepgraph::cli
