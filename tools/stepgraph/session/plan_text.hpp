#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "graphs/config/config.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/predict/step_report.hpp"
#include "graphs/step/offload/idle_settings.hpp"

namespace stepgraph {
struct StreamPlan;
}

namespace stepgraph::cli {

struct PlanText {
  bool json                                 = false;
  std::string_view step                     = {};       // "training" or "forward", if a command prints several
  std::optional<std::uint64_t> weights_hash = {};       // if data-parallel ranks were compared
  const StreamPlan* streams                 = nullptr;  // of a device, if they were planned
};
[[nodiscard]] JsonValue activations_json(const ActivationCounts& layers);
// A step and its size: one JSON line of type "plan", or a few lines of text.
[[nodiscard]] std::string plan_text(const Config& config, const StepGraph& step, const StepSize& size,
                                    const PlanText& options);

// Settings of offload that a step does not use: one line on stderr, or none.
void note_idle_settings(std::string_view command, const Config& config, const OffloadUse& use);
// Weights that offload.compress rounds in a step without updates: one line on stderr, or none.
void note_rounded_weights(std::string_view command, const Config& config, const StepGraph& step);

}  // namespace stepgraph::cli
