#include "graphs/step/offload/fill_device.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "engine/run/streams.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/layout/layout.hpp"

namespace stepgraph {
namespace {

class DeviceFill {
 public:
  DeviceFill(const Plan& plan, const StepOptions& options, const BuildOne& build)
      : plan_(plan), options_(options), build_(build), budget_(plan.offload.device_bytes) {
    if (plan.memory_limit_bytes > 0) budget_ = std::min(budget_, plan.memory_limit_bytes);
    // The plan of all ranks can need a little more than the plans of their slices.
    constexpr std::int64_t parts = 64;
    if (Layout(plan.layout).num_ranks() > 1) budget_ -= budget_ / parts;
  }

  // What is streamed needs slots, which may not fit. Updates on the host need none, so the host then does more.
  [[nodiscard]] OffloadAmounts filled(OffloadAmounts amounts) const {
    constexpr int most_doublings = 8;
    const bool divides           = options_.offload_rates.has_value() && amounts.optimizer > 0;
    for (int doublings = 0;; ++doublings) {
      OffloadAmounts made = amounts;
      std::int64_t left   = fill_with(made, &OffloadAmounts::resident_bytes, left_without_residents(made));
      if (divides && made.grads > 0) left = fill_with(made, &OffloadAmounts::gradient_bytes, left);
      if (left >= 0 || !divides || doublings == most_doublings) return made;
      amounts.host_scale *= 2;
    }
  }

  [[nodiscard]] OffloadAmounts fastest(const OffloadAmounts& given) const {
    Filled best = timed(given, given.host_scale);
    // The measured rates hold while all resources are busy. How long that is depends on the whole step.
    constexpr double factor  = 1.35;
    constexpr int most_steps = 4;
    for (const double direction : {factor, 1 / factor}) {
      bool better = false;
      for (int step = 0; step < most_steps; ++step) {
        Filled next = timed(given, best.amounts.host_scale * direction);
        if (!next.fits || next.seconds >= best.seconds) break;
        best   = std::move(next);
        better = true;
      }
      if (better) break;
    }
    return best.amounts;
  }

 private:
  struct Filled {
    OffloadAmounts amounts;
    double seconds = 0;  // simulated
    bool fits      = false;
  };

  [[nodiscard]] Filled timed(OffloadAmounts amounts, double host_scale) const {
    amounts.host_scale      = host_scale;
    amounts                 = filled(amounts);
    const StepGraph step    = build_(amounts);
    const MemoryPlan memory = planned_memory(step, plan_, options_);
    return {amounts, simulated_s(step, memory, *options_.simulator),
            memory.device_bytes(*step.graph.ranks().begin()) <= budget_};
  }

  // Where host memory is too small for all homes, what the device can hold is tried from above.
  [[nodiscard]] std::int64_t left_without_residents(const OffloadAmounts& amounts) const {
    try {
      return left_with(amounts);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::config || plan_.offload.host_bytes == 0) throw;
      return budget_;
    }
  }

  // Slots and gaps change with what stays, so what fits is tried: mostly once or twice, from above more often. Returns
  // what is left.
  std::int64_t fill_with(OffloadAmounts& amounts, std::int64_t OffloadAmounts::*field, std::int64_t left) const {
    std::int64_t fits = left;
    for (int attempt = 0; attempt < 12 && fits > 0; ++attempt) {
      amounts.*field         = fits;
      const std::int64_t now = left_with(amounts);
      if (now >= 0) return now;
      fits += now;
    }
    amounts.*field = 0;
    return left;
  }

  [[nodiscard]] std::int64_t left_with(const OffloadAmounts& amounts) const {
    const StepGraph step = build_(amounts);
    return budget_ - planned_memory(step, plan_, options_).device_bytes(*step.graph.ranks().begin());
  }

  const Plan& plan_;
  const StepOptions& options_;
  const BuildOne& build_;
  std::int64_t budget_;
};

}  // namespace

bool fills_device(const OffloadPlan& plan) noexcept {
  return plan.strategy == OffloadStrategy::manual && plan.optimizer && plan.device_bytes > 0;
}

MemoryPlan planned_memory(const StepGraph& step, const Plan& plan, const StepOptions& options) {
  return plan_memory(step.graph,
                     {.reuse = plan.reuse, .issue_order = options.issue_order, .workspaces = options.workspaces});
}

double simulated_s(const StepGraph& step, const MemoryPlan& memory, const Machine& device) {
  const Edges edges = stream_edges(step.graph, memory);
  return simulate({step.graph, edges}, device).makespan_s;
}

OffloadAmounts filled_device(OffloadAmounts amounts, const Plan& plan, const StepOptions& options,
                             const BuildOne& build) {
  return DeviceFill(plan, options, build).filled(std::move(amounts));
}

OffloadAmounts fill_device(const OffloadAmounts& amounts, const Plan& plan, const StepOptions& options,
                           const BuildOne& build) {
  const DeviceFill fill(plan, options, build);
  const bool divides = options.simulator != nullptr && options.offload_rates.has_value();
  return divides ? fill.fastest(amounts) : fill.filled(amounts);
}

}  // namespace stepgraph
