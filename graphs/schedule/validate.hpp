#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "graphs/schedule/schedule.hpp"

namespace stepgraph {

// A place in a schedule. One past a row's last action stands for a missing action.
struct Cell {
  std::size_t row = 0, column = 0;
  friend bool operator==(const Cell&, const Cell&) = default;
};

struct ScheduleFlaw {
  std::string message;      // what is wrong, without the grid
  std::vector<Cell> cells;  // where; several when ranks wait for each other
};

// Properties of a schedule that can run.
struct ScheduleFacts {
  bool has_transfers    = false;  // it was lowered: SEND and RECV are in it
  bool weights_in_order = true;   // every stage adds weight gradients (W or B) in microbatch order, so that their sums
                                  // have the bits of any other such schedule
};

// Finds the first flaw. A schedule without one has these properties:
// - it has at most max_stage_microbatches pairs of a stage and a microbatch
// - every action is of a stage of its rank; every stage does every microbatch once: F, and either B or I and W
// - I or B follow F, W follows I; an input exists when an action needs it
// - nothing hangs when each rank does its row in order, receives block and sends do not. With transfers in it, every
//   message between ranks is sent once and received once, in the order in which messages between those two stages are
//   sent; without, actions wait for what they need
// - with UNSHARD in it, weights are there when they are used; REDUCE_GRAD follows a stage's last W or B
[[nodiscard]] std::optional<ScheduleFlaw> find_flaw(const PipelineSchedule& schedule);

// Throws Error(config) with the flaw and the grid around it, the bad cells marked.
ScheduleFacts validate(const PipelineSchedule& schedule);

// The actions around some cells, a line for each rank, with those cells in brackets.
[[nodiscard]] std::string grid_text(const PipelineSchedule& schedule, const std::vector<Cell>& marked);

}  // namespace stepgraph
