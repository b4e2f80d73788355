#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/models/model.hpp"
#include "graphs/plan/plan.hpp"
#include "graphs/predict/calibration.hpp"
#include "graphs/predict/rate_fit.hpp"
#include "graphs/train/step_run.hpp"

// The parts of calibrate(). Internal to graphs/predict.
namespace stepgraph::trials {

// One measured step: a model of few layers in one layout.
struct Trial {
  Model model;
  Plan plan       = {};
  BatchSpec batch = {};
};

// Between a device and the host.
[[nodiscard]] inline bool is_transfer(std::string_view op) { return op == "h2d" || op == "d2h"; }

// Sets cheap values of the size of fresh weights.
void set_some_weights(StepRun& run);
[[nodiscard]] std::vector<std::int32_t> some_tokens(const Trial& trial);  // of one step

// A copy of the graph whose nodes are changed by `change`.
[[nodiscard]] Graph with_nodes(const Graph& graph, const std::function<void(NodeSpec&)>& change);

// With CalibrateOptions::device.
[[nodiscard]] Calibration calibrate_device(const MakeWorld& make_world, const CalibrateOptions& options, int threads);

// Copies between a device and the host, and updates on the host, alone and beside each other.
struct Transfers {
  Calibration::Ops ops                    = {};
  Calibration::Ops ops_bf16               = {};
  std::vector<Calibration::Beside> beside = {};
};
[[nodiscard]] Transfers measure_transfers(World& world, const CalibrateOptions& options, int threads);

// Makes copies and host updates of the calibration as slow as they are in a step with offload.
void fit_to_offloaded_step(World& world, const CalibrateOptions& options, int threads, Calibration& calibration);

}  // namespace stepgraph::trials
