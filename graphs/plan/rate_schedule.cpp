#include "graphs/plan/rate_schedule.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "engine/base/error.hpp"
#include "engine/base/text.hpp"

namespace stepgraph {
namespace {

[[noreturn]] void refuse(std::string_view key, const std::string& why) {
  throw Error(ErrorKind::config, str("optimizer.schedule.", key, ": ", why));
}

double half_cosine(double progress) { return 0.5 * (1 + std::cos(std::numbers::pi * progress)); }
double above(double min, double factor) { return factor * (1 - min) + min; }
double ratio(std::int64_t part, std::int64_t of) {
  return static_cast<double>(part) / static_cast<double>(std::max<std::int64_t>(1, of));
}

// The phases fit into the steps, where these are known.
void check_phases(const RateSchedule& schedule, std::string_view key) {
  if (schedule.kind == RateKind::constant || schedule.steps == 0) return;
  if (schedule.warmup <= schedule.steps - schedule.decay) return;
  refuse(key, str(schedule.steps, " steps are fewer than warmup ", schedule.warmup,
                  schedule.kind == RateKind::wsd ? str(" + decay ", schedule.decay) : "", " (as many or more)"));
}

}  // namespace

std::string_view to_string(RateKind kind) noexcept {
  constexpr std::array<std::string_view, 4> names{"constant", "linear", "cosine", "wsd"};
  return names[static_cast<std::size_t>(kind)];
}

// get_constant_schedule_with_warmup, get_linear_schedule_with_warmup, get_cosine_with_min_lr_schedule_with_warmup and
// get_wsd_schedule of transformers/optimization.py, with their defaults.
double rate_factor(const RateSchedule& schedule, std::int64_t step) {
  const auto& [kind, warmup, decay, steps, min] = schedule;
  if (step < warmup) {
    const double factor = ratio(step, warmup);
    return kind == RateKind::wsd ? above(min, factor) : factor;
  }
  switch (kind) {
    case RateKind::constant:
      break;
    case RateKind::linear:
      return above(min, std::max(0.0, ratio(steps - step, steps - warmup)));
    case RateKind::cosine:
      return above(min, half_cosine(ratio(step - warmup, steps - warmup)));
    case RateKind::wsd:
      if (step >= steps) return min;
      if (step >= steps - decay) return above(min, half_cosine(ratio(step - (steps - decay), decay)));
      break;
  }
  return 1;
}

void check_rate_schedule(const RateSchedule& schedule) {
  const auto& [kind, warmup, decay, steps, min] = schedule;
  for (const auto& [key, value] : {std::pair("warmup", warmup), std::pair("decay", decay), std::pair("steps", steps)}) {
    if (value < 0) refuse(key, str(value, " (0 or more)"));
  }
  if (!(min >= 0 && min <= 1)) refuse("min", str(min, " (a ratio of lr, from 0 to 1)"));
  if (kind == RateKind::wsd && decay == 0) refuse("decay", "missing with kind wsd (steps of its last phase)");
  if (kind != RateKind::wsd && decay > 0)
    refuse("decay", str(decay, " has no effect with kind ", kind, " (kind wsd, whose last phase it is)"));
  if (kind == RateKind::constant && steps > 0)
    refuse("steps", str(steps, " has no effect with kind constant (kind linear, cosine or wsd)"));
  if (kind == RateKind::constant && min > 0)
    refuse("min", str(min, " has no effect with kind constant (kind linear, cosine or wsd)"));
  check_phases(schedule, "steps");
}

RateSchedule with_total_steps(RateSchedule schedule, std::int64_t total) {
  if (schedule.kind == RateKind::cosine && schedule.steps > 0 && total > schedule.steps)
    refuse("steps", str(schedule.steps, " with a run of ", total, " steps: after its end a cosine rises again (", total,
                        " or more, or fewer steps of the run)"));
  if (schedule.kind == RateKind::constant || schedule.steps > 0) return schedule;
  schedule.steps = total;
  check_phases(schedule, "steps");
  return schedule;
}

}  // namespace stepgraph
