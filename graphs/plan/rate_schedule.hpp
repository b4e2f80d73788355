#pragma once
#include <cstdint>
#include <ostream>
#include <string_view>

namespace stepgraph {

// How the learning rate changes over a run: the schedules of Hugging Face transformers with the same names.
//   constant  the rate of the optimizer, after a linear warm-up from 0
//   linear    warm-up, then a straight line down to `min` at step `steps`
//   cosine    warm-up, then half a cosine down to `min` at step `steps`
//   wsd       warm-up from `min`, stable, and half a cosine down to `min` in the last `decay` of `steps` steps
// After step `steps` the rate of linear and wsd stays at `min`; that of cosine would rise again, as in transformers, so
// a run must not have more steps. Rates follow steps: a step whose update is skipped counts too.
enum class RateKind : std::uint8_t { constant, linear, cosine, wsd };
[[nodiscard]] std::string_view to_string(RateKind kind) noexcept;
inline std::ostream& operator<<(std::ostream& out, RateKind kind) { return out << to_string(kind); }

struct RateSchedule {
  RateKind kind                                                    = RateKind::constant;
  std::int64_t warmup                                              = 0;  // steps
  std::int64_t decay                                               = 0;  // wsd: steps of the last phase
  std::int64_t steps                                               = 0;  // of the whole schedule; 0: those of the run
  double min                                                       = 0;  // a ratio of the optimizer's rate
  friend bool operator==(const RateSchedule&, const RateSchedule&) = default;
};

// The factor of the rate in a step, from 0. `steps` of the schedule must be set unless it is constant.
[[nodiscard]] double rate_factor(const RateSchedule& schedule, std::int64_t step);

// Throws Error(config) for values out of range, for phases that are longer than the schedule, and for values that have
// no effect with the kind. Messages use the names of configs: "optimizer.schedule.decay: ...".
void check_rate_schedule(const RateSchedule& schedule);

// The schedule of a run of `total` steps: sets `steps` if it is 0. Throws Error(config) if the phases are longer, or if
// a cosine has fewer steps than the run.
[[nodiscard]] RateSchedule with_total_steps(RateSchedule schedule, std::int64_t total);

}  // namespace stepgraph
