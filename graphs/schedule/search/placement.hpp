#pragma once
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/search/bound.hpp"
#include "graphs/schedule/search/counts.hpp"
#include "graphs/schedule/search/timer.hpp"

namespace stepgraph::search {

// Whether two spans differ by rounding alone.
[[nodiscard]] bool same_span(double a, double b) noexcept;

// A fixed kind as it is: with B, and microbatches in its own order.
struct FixedKind {
  ScheduleKind kind{};
  PipelineSchedule schedule = {};  // no rows: none fits
  double span = never, peak = never;
};

// The search for one placement: starts (fixed kinds, rules), then counts, then moves of single actions.
class PlacementSearch {
 public:
  // The setting must outlive it. `stop` is asked while the lower bound is found; a bound that is stopped is lower.
  PlacementSearch(const Setting& setting, std::uint64_t seed, const std::function<bool()>& stop);

  // `is_over` is asked now and then. start() comes first; it always has a result, even without time that of two kinds
  // that fit, or of rules.
  void start(const std::function<bool()>& is_over);
  void improve(double budget_s, const std::function<bool()>& is_over);

  [[nodiscard]] const Setting& setting() const noexcept { return *setting_; }
  [[nodiscard]] double bound_span() const noexcept { return bound_.span; }
  [[nodiscard]] double span() const noexcept { return span_; }  // the longest of the best rows
  [[nodiscard]] const std::string& how() const noexcept { return how_; }
  [[nodiscard]] const std::string& doing() const noexcept { return doing_; }
  // The best kind that fits the limit, of those whose W are in microbatch order. The rows of all kinds that fit, with
  // the microbatches in order, are among the starts of the search.
  [[nodiscard]] const FixedKind& fixed() const noexcept { return fixed_; }
  // Of the best rows; some I and W are joined.
  [[nodiscard]] PipelineSchedule schedule(const std::function<bool()>& is_over) const;

 private:
  struct Start {
    double span   = never;
    Counts counts = {};
    MakeRows make = {};
  };
  void take(const std::string& how);  // the timer's rows, if they are the best
  void try_rows(const Rows& rows, const std::string& how);
  void try_kinds(const std::function<bool()>& is_over);
  void try_unchanged(ScheduleKind kind, PipelineSchedule schedule);
  void try_rules(const std::function<bool()>& is_over);
  std::vector<Counts> counts_to_try() const;
  std::vector<MakeRows> makers() const;

  const Setting* setting_;
  SpanBound bound_;
  RowTimer timer_;
  std::mt19937_64 random_;
  std::vector<Start> starts_;  // the best first
  Rows best_;
  FixedKind fixed_;
  double span_ = never, enough_ = 0;
  double first_ = never;  // the span of one microbatch after another
  std::string how_, doing_;
};

}  // namespace stepgraph::search
