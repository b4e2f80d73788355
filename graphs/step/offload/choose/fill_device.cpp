#include "graphs/step/offload/choose/fill_device.hpp"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/plan/planned_sizes.hpp"
#include "engine/run/streams.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/layout/layout.hpp"

namespace stepgraph {
namespace {

MemoryPlanOptions planning(const Plan& plan, const StepOptions& options) {
  return {.reuse = plan.reuse, .issue_order = options.issue_order, .workspaces = options.workspaces};
}

class DeviceFill {
 public:
  DeviceFill(const Plan& plan, const StepOptions& options, const BuildOne& build)
      : plan_(plan), options_(options), build_(build), budget_(budget_to_fill(plan)) {}

  // The same amounts with gradients of the units that the host updates in host memory, if they may be there.
  [[nodiscard]] std::optional<OffloadAmounts> with_host_gradients(OffloadAmounts amounts) const {
    if (amounts.host_gradients || !may_move_host_gradients(amounts, options_)) return std::nullopt;
    amounts.host_gradients = true;
    return amounts;
  }

  // Gradients in host memory leave room for states on the device. With a disk they take the host memory of states,
  // which are then read and written there: so they move only if the device is too small otherwise.
  [[nodiscard]] OffloadAmounts filled_best(const OffloadAmounts& amounts) const {
    const bool may_spill = plan_.offload.host_bytes > 0 && !plan_.offload.disk.empty();
    if (may_spill) {
      const OffloadAmounts made = filled(amounts);
      if (left_with(made) >= 0) return made;
    }
    if (const auto made = filled_with_host_gradients(amounts)) return *made;
    return filled(amounts);
  }

  // None: they may not be there, or they do not fit host_bytes, or the device is too small all the same.
  [[nodiscard]] std::optional<OffloadAmounts> filled_with_host_gradients(const OffloadAmounts& amounts) const {
    const auto more = with_host_gradients(amounts);
    if (!more) return std::nullopt;
    try {
      const OffloadAmounts made = filled(*more);
      if (left_with(made) >= 0) return made;
    } catch (const Error& error) {
      if (!is_about_host(error)) throw;
    }
    return std::nullopt;
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
    try_host_gradients(best, given.host_scale);
    // The measured rates hold while all resources are busy. How long that is depends on the whole step.
    constexpr int most_steps = 4, most_equal = 2;
    for (const double factor : {2.5, 1.35, 1.12}) {
      for (const double direction : {factor, 1 / factor}) {
        const double from = best.seconds;
        double scale      = best.amounts.host_scale;
        for (int step = 0, equal = 0; step < most_steps && equal < most_equal; ++step) {
          scale *= direction;
          std::optional<Filled> next = timed_if_room(without_residents(best.amounts), scale);
          if (!next || !next->fits || next->seconds > best.seconds) break;
          equal = next->seconds < best.seconds ? 0 : equal + 1;
          if (equal == 0) best = std::move(*next);
        }
        if (best.seconds < from) break;
      }
    }
    try_host_gradients(best, best.amounts.host_scale);
    return best.amounts;
  }

 private:
  // The amounts before the device was filled.
  [[nodiscard]] static OffloadAmounts without_residents(OffloadAmounts amounts) {
    amounts.resident_bytes = amounts.gradient_bytes = 0;
    return amounts;
  }

  struct Filled {
    OffloadAmounts amounts;
    double seconds = 0;  // simulated
    bool fits      = false;
  };

  struct Tried {
    std::int64_t bytes = 0, left = 0;
  };

  // Not all homes fit host_bytes.
  [[nodiscard]] bool is_about_host(const Error& error) const {
    return error.kind() == ErrorKind::config && plan_.offload.host_bytes > 0;
  }

  void try_host_gradients(Filled& best, double host_scale) const {
    const auto more = with_host_gradients(without_residents(best.amounts));
    if (!more) return;
    std::optional<Filled> other = timed_if_room(*more, host_scale);
    if (other && other->fits && (!best.fits || other->seconds < best.seconds)) best = std::move(*other);
  }

  // None: host memory has no room for all homes.
  [[nodiscard]] std::optional<Filled> timed_if_room(const OffloadAmounts& amounts, double host_scale) const {
    try {
      return timed(amounts, host_scale);
    } catch (const Error& error) {
      if (!is_about_host(error)) throw;
      return std::nullopt;
    }
  }

  [[nodiscard]] Filled timed(OffloadAmounts amounts, double host_scale) const {
    amounts.host_scale      = host_scale;
    amounts                 = filled(amounts);
    const StepGraph& step   = built(amounts);
    const MemoryPlan memory = planned_memory(step, plan_, options_);
    return {amounts, simulated_s(step, memory, *options_.simulator),
            memory.device_bytes(*step.graph.ranks().begin()) <= budget_};
  }

  // Where host memory is too small for all homes, what the device can hold is tried from above.
  [[nodiscard]] std::int64_t left_without_residents(const OffloadAmounts& amounts) const {
    try {
      return left_with(amounts);
    } catch (const Error& error) {
      if (!is_about_host(error)) throw;
      return budget_;
    }
  }

  // Slots, gaps and gradients change with what stays, so what fits is tried: mostly once or twice, from above more
  // often. Returns what is left.
  std::int64_t fill_with(OffloadAmounts& amounts, std::int64_t OffloadAmounts::*field, std::int64_t left) const {
    std::optional<Tried> too_many;
    std::exception_ptr no_room;  // the last error about host memory
    std::int64_t too_few = -1;   // bytes on the device at that error
    std::int64_t fits    = left;
    for (int attempt = 0; attempt < 12 && fits > 0; ++attempt) {
      amounts.*field = fits;
      try {
        const std::int64_t now = left_with(amounts);
        if (now >= 0) return too_many ? fill_between(amounts, field, {fits, now}, *too_many) : now;
        too_many = {fits, now};
        fits += now;
      } catch (const Error& error) {
        if (!too_many || !is_about_host(error)) throw;
        no_room = std::current_exception();
        too_few = fits;
      }
      if (fits <= too_few) fits = too_few + (too_many->bytes - too_few) / 2;
    }
    if (no_room) std::rethrow_exception(no_room);
    amounts.*field = 0;
    return left;
  }

  // Interpolates between a number of bytes that fits and one that does not: the memory left is about linear in it.
  std::int64_t fill_between(OffloadAmounts& amounts, std::int64_t OffloadAmounts::*field, Tried fits,
                            Tried too_many) const {
    constexpr std::int64_t parts = 64;  // of the budget: less is not worth another attempt
    for (int attempt = 0; attempt < 3 && fits.left > budget_ / parts; ++attempt) {
      const double share = static_cast<double>(fits.left) / static_cast<double>(fits.left - too_many.left);
      amounts.*field = fits.bytes + static_cast<std::int64_t>(share * static_cast<double>(too_many.bytes - fits.bytes));
      std::int64_t now = 0;
      try {
        now = left_with(amounts);
      } catch (const Error& error) {
        if (!is_about_host(error)) throw;
        break;
      }
      (now >= 0 ? fits : too_many) = {amounts.*field, now};
    }
    amounts.*field = fits.bytes;
    return fits.left;
  }

  [[nodiscard]] std::int64_t left_with(const OffloadAmounts& amounts) const {
    const auto known =
        std::find_if(left_.begin(), left_.end(), [&](const auto& each) { return each.first == amounts; });
    if (known != left_.end()) return known->second;
    const std::int64_t left = budget_ - planned_device_bytes(built(amounts), plan_, options_);
    left_.emplace_back(amounts, left);
    return left;
  }

  // The last step is kept: what was tried last is most often chosen, and then simulated.
  [[nodiscard]] const StepGraph& built(const OffloadAmounts& amounts) const {
    if (!last_ || last_->first != amounts) {
      last_.reset();
      last_.emplace(amounts, build_(amounts));
    }
    return last_->second;
  }

  const Plan& plan_;
  const StepOptions& options_;
  const BuildOne& build_;
  std::int64_t budget_;
  mutable std::vector<std::pair<OffloadAmounts, std::int64_t>> left_;  // bytes of the budget, by amounts
  mutable std::optional<std::pair<OffloadAmounts, StepGraph>> last_;
};

}  // namespace

bool fills_device(const OffloadPlan& plan) noexcept {
  return plan.strategy == OffloadStrategy::manual && plan.optimizer && plan.device_bytes > 0;
}

bool stays_if_it_fits(const OffloadPlan& plan) noexcept {
  return plan.strategy == OffloadStrategy::manual && plan.moves_something() && plan.device_bytes > 0;
}

std::int64_t budget_to_fill(const Plan& plan) {
  constexpr std::int64_t parts = 64;
  std::int64_t bytes           = plan.offload.device_bytes;
  if (plan.memory_limit_bytes > 0) bytes = std::min(bytes, plan.memory_limit_bytes);
  return Layout(plan.layout).num_ranks() > 1 ? bytes - bytes / parts : bytes;
}

bool may_move_host_gradients(const OffloadAmounts& amounts, const StepOptions& options) noexcept {
  return options.update_first && amounts.optimizer > 0 && amounts.grads == 0;
}

MemoryPlan planned_memory(const StepGraph& step, const Plan& plan, const StepOptions& options) {
  return plan_memory(step.graph, planning(plan, options));
}

std::int64_t planned_device_bytes(const StepGraph& step, const Plan& plan, const StepOptions& options) {
  return planned_sizes(step.graph, planning(plan, options), Space::device).device_bytes(*step.graph.ranks().begin());
}

double simulated_s(const StepGraph& step, const MemoryPlan& memory, const Machine& device) {
  const Edges edges = stream_edges(step.graph, memory);
  return simulate({step.graph, edges}, device).makespan_s;
}

OffloadAmounts filled_device(const OffloadAmounts& amounts, const Plan& plan, const StepOptions& options,
                             const BuildOne& build) {
  return DeviceFill(plan, options, build).filled_best(amounts);
}

OffloadAmounts fill_device(const OffloadAmounts& amounts, const Plan& plan, const StepOptions& options,
                           const BuildOne& build) {
  const DeviceFill fill(plan, options, build);
  const bool divides = options.simulator != nullptr && options.offload_rates.has_value();
  return divides ? fill.fastest(amounts) : fill.filled_best(amounts);
}

}  // namespace stepgraph
