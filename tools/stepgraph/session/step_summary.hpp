#pragma once
#include <string>

#include "graphs/predict/step_report.hpp"

namespace stepgraph::cli {

// Figures of one measured step; memory was poisoned before the run.
[[nodiscard]] std::string to_text(const StepFigures& summary);
[[nodiscard]] std::string to_json(const StepFigures& summary);

}  // namespace stepgraph::cli
