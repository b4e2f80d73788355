#include "tools/stepgraph/session/plan_text.hpp"

#include <algorithm>
#include <functional>
#include <iostream>
#include <vector>

#include "engine/base/words.hpp"
#include "engine/run/streams.hpp"
#include "graphs/predict/offload_report.hpp"
#include "ops/transfers/hash.hpp"
#include "tools/stepgraph/terminal/output.hpp"

namespace stepgraph::cli {
namespace {

template <class Number>
std::string count(Number number, std::string_view one, std::string_view more) {
  return str(number, " ", number == 1 ? one : more);
}

std::string streams_text(const StreamPlan& plan) {
  return str("\non devices: ", count(plan.num_streams(), "stream", "streams"), ", ",
             count(plan.num_events(), "event", "events"), "; ", count(plan.waits.size(), "wait", "waits"),
             " in a step, ", plan.loop_waits.size(), " for the step before");
}

}  // namespace

JsonValue activations_json(const ActivationCounts& layers) {
  return {{"offloaded", layers.offloaded}, {"recomputed", layers.recomputed}, {"kept", layers.kept}};
}

std::string plan_text(const Config& config, const StepGraph& step, const StepSize& size, const PlanText& options) {
  const std::vector<std::int64_t>& peaks = size.peak_bytes;
  const std::int64_t num_parameters      = step.model.parameters().num_elements();
  const auto activations                 = step.activations();
  if (options.json) {
    JsonValue line = {{"type", "plan"}};
    if (!options.step.empty()) line.set("step", options.step);
    if (!step.window.empty()) line.set("window", step.window.size());
    line.add({{"model", step.model.kind},
              {"parameters", num_parameters},
              {"layout", to_string(step.layout.spec())},
              {"ranks", step.layout.num_ranks()},
              {"schedule", config.plan.pipeline.schedule},
              {"stages", step.schedule.num_stages()},
              {"layers", step.layers},
              {"microbatches", step.num_microbatches},
              {"nodes", size.nodes},
              {"edges", size.edges},
              {"reuse_edges", size.reuse_edges},
              {"peak_bytes", peaks},
              {"host_bytes", size.host_bytes},
              {"disk_bytes", size.disk_bytes}});
    if (activations) line.set("activation_layers", activations_json(*activations));
    if (options.streams != nullptr)
      line.add({{"streams", options.streams->num_streams()},
                {"events", options.streams->num_events()},
                {"event_waits", options.streams->waits.size()},
                {"loop_waits", options.streams->loop_waits.size()}});
    if (options.weights_hash) line.set("weights_hash", hash_text(*options.weights_hash));
    return json_line(line);
  }
  const auto most_of = [](const std::vector<std::int64_t>& bytes) {
    const double mib = static_cast<double>(*std::max_element(bytes.begin(), bytes.end())) / (1 << 20);
    return mib < 1024 ? str(short_number(mib, 3), " MiB") : str(short_number(mib / 1024, 3), " GiB");
  };
  const bool uneven = std::ranges::adjacent_find(step.layers, std::not_equal_to{}) != step.layers.end();
  const auto beside = [&](const std::vector<std::int64_t>& bytes, std::string_view where) {
    const bool none = std::all_of(bytes.begin(), bytes.end(), [](std::int64_t one) { return one == 0; });
    return none ? std::string() : str(", ", most_of(bytes), " ", where);
  };
  return str(
      options.step, options.step.empty() ? "" : " step:\n", step.model.kind, ": ",
      count(step.model.layers, "layer", "layers"), ", width ", step.model.width, ", ", num_parameters, " parameters; ",
      count(step.layout.num_ranks(), "rank", "ranks"), " (", to_string(step.layout.spec()), "), ",
      config.plan.pipeline.schedule, " over ", count(step.schedule.num_stages(), "stage", "stages"),
      uneven ? str(" (", join_text(step.layers, ", ", [](int layers) { return str(layers); }), " layers)") : "",
      " and ", count(step.num_microbatches, "microbatch", "microbatches"),
      step.window.size() > 1 ? str("\nwindow of ", step.window.size(), " steps: ") : "\nstep: ", size.nodes, " nodes, ",
      size.edges, " edges; at most ", most_of(peaks), " on a rank", beside(size.host_bytes, "in its host memory"),
      beside(size.disk_bytes, "on its disk"), activations ? str("\nactivations: ", to_text(*activations)) : "",
      options.streams != nullptr ? streams_text(*options.streams) : "",
      options.weights_hash
          ? str("\nweights: ", hash_text(*options.weights_hash), ", equal on all data-parallel ranks that hold them")
          : "");
}

void note_idle_settings(std::string_view command, const Config& config, const OffloadUse& use) {
  const std::string text = idle_settings_text(config.plan.offload, use);
  if (!text.empty()) std::cerr << "stepgraph " << command << ": " << text << '\n';
}

void note_rounded_weights(std::string_view command, const Config& config, const StepGraph& step) {
  if (!rounds_weights(step.offload.units)) return;
  std::cerr << "stepgraph " << command << ": note: offload.compress " << to_string(config.plan.offload.compress)
            << " is lossy: weights are rounded, which changes the results\n";
}

}  // namespace stepgraph::cli
