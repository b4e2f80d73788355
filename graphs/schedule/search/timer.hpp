#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "graphs/schedule/search/rows.hpp"

// A timer of rows that is much faster than the engine's simulator.
namespace stepgraph::search {

// How many of each letter stand before a position.
using LetterCounts = std::array<std::uint16_t, 3 * most_chunks>;

// The times of rows, each action as early as its row and its data allow. A change of a row is timed from the first
// place that it can affect.
class RowTimer {
 public:
  explicit RowTimer(const Setting& setting);

  // Times all rows. False: ranks wait for each other, or a span exceeds `at_most`. Nothing but set() may follow then.
  bool set(const Rows& rows, double at_most = never);

  // Moves the letter at `from` to position `to` of the row, and times the result. Returns its longest span; `never` if
  // the rows cannot run, do not fit the limit, or if a span exceeds `at_most`. The caller then calls keep() or undo();
  // for a result of `never` the change is undone already.
  double move(int rank, int from, int to, double at_most);
  // The same for other rows of the same setting, which fit the limit. Rows that begin alike are timed from where they
  // differ.
  double replace(const Rows& rows, double at_most);
  void keep();
  void undo();

  [[nodiscard]] double longest_span() const noexcept { return longest_; }
  [[nodiscard]] double span(int rank) const noexcept { return spans_[size(rank)]; }
  [[nodiscard]] double makespan() const noexcept;
  [[nodiscard]] const Rows& rows() const noexcept { return rows_; }
  [[nodiscard]] double begin(int rank, int position) const noexcept { return begins_[at(rank, position)]; }
  [[nodiscard]] double end(int rank, int position) const noexcept {
    return begin(rank, position) + time_of(rank, rows_.letters[at(rank, position)]);
  }
  [[nodiscard]] double time_of(int rank, Letter letter) const noexcept { return use(rank, letter).time; }
  [[nodiscard]] std::int64_t num_timed() const noexcept { return num_timed_; }  // actions, over all calls

  // An action of another rank whose data the action waited for: it started as this data came. rank -1: none.
  struct Place {
    int rank = -1, position = -1;
  };
  [[nodiscard]] Place waited_for(int rank, int position) const;

 private:
  // What a letter means in a row.
  struct Use {
    double time     = 0;
    double transfer = 0;
    int makes = -1, needs = -1;  // numbers of data: 2 * stage + (F or I); -1: none that another action needs
    int wakes = -1;              // the rank that needs what it makes
  };
  [[nodiscard]] std::size_t at(int rank, int position) const noexcept {
    return size(rank) * size(rows_.length) + size(position);
  }
  [[nodiscard]] const Use& use(int rank, Letter letter) const noexcept {
    return uses_[size(rank) * 3 * most_chunks + letter];
  }
  [[nodiscard]] double ready(int data, int number) const noexcept {
    return ready_[size(data) * size(setting_.microbatches) + size(number)];
  }
  bool may_move(int rank, int low, int high) const;
  void count(int rank, int low, int high);
  void begin_change();
  double time_change(double at_most);
  bool time_from(const std::vector<int>& first, double at_most);
  void copy_tail(const std::vector<int>& first, bool restore);

  const Setting& setting_;
  Rows rows_, kept_rows_;
  std::vector<Use> uses_;                     // [rank][letter]
  std::vector<double> begins_, kept_begins_;  // [rank * length + position]
  std::vector<double> ready_, kept_ready_;    // [data * microbatches + number]: end of the action that makes it
  std::vector<LetterCounts> counts_;          // [rank * length + position]
  std::vector<double> spans_, kept_spans_, works_;
  double longest_ = never, kept_longest_ = never;
  // Of one timing:
  std::vector<int> first_, next_, done_, waits_, waits_number_, stack_;
  std::vector<double> free_at_, idle_, allowed_idle_;
  bool is_kept_ = false;  // the kept values are those of rows_
  struct Change {
    int rank, low, high;  // positions low to high of a row
  };
  std::vector<Change> changes_;
  std::int64_t num_timed_ = 0;
};

}  // namespace stepgraph::search
