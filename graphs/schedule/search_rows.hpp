#pragma once
#include <array>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "graphs/schedule/graph.hpp"
#include "graphs/schedule/schedule.hpp"

// What the search works on: rows of letters, and a timer that is much faster than the engine's simulator. Internal.
namespace stepgraph::search {

// Microbatches are alike, so a row is a word. The k-th F of a stage is that of microbatch k, and so are the k-th I and
// the k-th W. This loses nothing: take any schedule and number the microbatches of each stage anew, in the order in
// which the stage does them. When the k-th F of a stage starts, the stage before has done k of them, so also its first
// k; the same holds for I. So no action can start later than before.
//
// A letter is 3 * slot + kind: the slot counts the stages of the rank from 0, kinds are F, I and W.
using Letter           = std::uint8_t;
inline constexpr int F = 0, I = 1, W = 2;
inline constexpr int most_chunks       = 2;
inline constexpr int most_microbatches = 65535;
inline constexpr double never          = std::numeric_limits<double>::infinity();

// One placement of the stages with the costs of each.
struct Setting {
  int ranks = 1, chunks = 1, microbatches = 1;
  std::vector<Rank> rank_of_stage = {};
  std::vector<Costs> costs        = {};  // [stage]
  double retain                   = 1;
  double limit                    = never;  // of the activations of a rank

  [[nodiscard]] int num_stages() const noexcept { return ranks * chunks; }
  [[nodiscard]] int rank_of(int stage) const noexcept { return index(rank_of_stage[static_cast<std::size_t>(stage)]); }
  [[nodiscard]] const Costs& cost(int stage) const noexcept { return costs[static_cast<std::size_t>(stage)]; }
  [[nodiscard]] int row_length() const noexcept { return 3 * chunks * microbatches; }
  [[nodiscard]] std::vector<int> stages_of(int rank) const;  // in ascending order: by slot
  // The time from the end of an action of `from` until its data is at the neighbour `to`.
  [[nodiscard]] double transfer(int from, int to) const noexcept;
  [[nodiscard]] double work(int rank) const noexcept;  // all actions of the rank
  [[nodiscard]] double most_work() const noexcept;
  // As peak_activations counts: microbatches that have done F and not I, and those that have done I and not W.
  [[nodiscard]] double activation(int whole, int retained) const noexcept {
    return (whole + retain * retained) / chunks;
  }
};

struct Rows {
  int length                  = 0;   // of a row
  std::vector<Letter> letters = {};  // [rank * length + position]

  [[nodiscard]] const Letter* row(int rank) const noexcept { return letters.data() + std::ptrdiff_t{rank} * length; }
  [[nodiscard]] Letter* row(int rank) noexcept { return letters.data() + std::ptrdiff_t{rank} * length; }
};

// B becomes I, W. That is never slower and holds no more: the I ends earlier, and so does what it frees. The schedule
// must have the setting's placement, compute actions only, and be valid.
[[nodiscard]] Rows rows_of(const Setting& setting, const PipelineSchedule& schedule);
// `joined`: [rank * length + position of an I that is followed by its W], written as B. Empty: none.
[[nodiscard]] PipelineSchedule schedule_of_rows(const Setting& setting, const Rows& rows,
                                                const std::vector<bool>& joined = {});
[[nodiscard]] bool fits(const Setting& setting, const Rows& rows);

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
  [[nodiscard]] double span(int rank) const noexcept { return spans_[static_cast<std::size_t>(rank)]; }
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
    return static_cast<std::size_t>(rank) * static_cast<std::size_t>(rows_.length) + static_cast<std::size_t>(position);
  }
  [[nodiscard]] const Use& use(int rank, Letter letter) const noexcept {
    return uses_[static_cast<std::size_t>(rank) * 3 * most_chunks + letter];
  }
  [[nodiscard]] double ready(int data, int number) const noexcept {
    return ready_[static_cast<std::size_t>(data) * static_cast<std::size_t>(setting_.microbatches) +
                  static_cast<std::size_t>(number)];
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
