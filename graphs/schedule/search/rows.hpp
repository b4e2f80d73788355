#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "graphs/schedule/graph.hpp"
#include "graphs/schedule/schedule.hpp"

// What the search works on: rows of letters. Internal, like the other files of this folder.
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
[[nodiscard]] constexpr int kind_of(Letter letter) noexcept { return letter % 3; }
[[nodiscard]] constexpr int slot_of(Letter letter) noexcept { return letter / 3; }

// A number that is not negative, as an index or a size.
[[nodiscard]] constexpr std::size_t size(int number) noexcept { return static_cast<std::size_t>(number); }

// One placement of the stages with the costs of each.
struct Setting {
  int ranks = 1, chunks = 1, microbatches = 1;
  std::vector<Rank> rank_of_stage = {};
  std::vector<Costs> costs        = {};  // [stage]
  double retain                   = 1;
  double limit                    = never;  // of the activations of a rank

  [[nodiscard]] int num_stages() const noexcept { return ranks * chunks; }
  [[nodiscard]] int rank_of(int stage) const noexcept { return index(rank_of_stage[size(stage)]); }
  [[nodiscard]] const Costs& cost(int stage) const noexcept { return costs[size(stage)]; }
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

}  // namespace stepgraph::search
