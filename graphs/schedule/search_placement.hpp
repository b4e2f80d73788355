#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/search_bound.hpp"
#include "graphs/schedule/search_counts.hpp"
#include "graphs/schedule/search_rows.hpp"

namespace stepgraph::search {

// A fixed kind for this setting; none if it has another placement or does not take these numbers.
[[nodiscard]] std::optional<PipelineSchedule> fixed_kind(const Setting& setting, ScheduleKind kind);

// The search for one placement: starts (fixed kinds, rules), then counts, then moves of single actions.
class PlacementSearch {
 public:
  PlacementSearch(const Setting& setting, std::uint64_t seed);  // the setting must outlive it

  // `is_over` is asked now and then. start() comes first; it always has a result.
  void start(const std::function<bool()>& is_over);
  void improve(double budget_s, const std::function<bool()>& is_over);

  [[nodiscard]] const Setting& setting() const noexcept { return *setting_; }
  [[nodiscard]] double bound_span() const noexcept { return bound_.span; }
  [[nodiscard]] double span() const noexcept { return span_; }  // the longest of the best rows
  [[nodiscard]] const std::string& how() const noexcept { return how_; }
  [[nodiscard]] const std::string& doing() const noexcept { return doing_; }
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
  void try_rules(const std::function<bool()>& is_over);
  std::vector<Counts> counts_to_try() const;
  std::vector<MakeRows> makers() const;

  const Setting* setting_;
  SpanBound bound_;
  RowTimer timer_;
  std::mt19937_64 random_;
  std::vector<Start> starts_;  // the best first
  Rows best_;
  double span_ = never, enough_ = 0;
  std::string how_, doing_;
};

}  // namespace stepgraph::search
