#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/types.hpp"

namespace stepgraph {

// A slice of the model, numbered from 0 in the order of the forward pass, and a slice of the batch.
enum class Stage : int {};
enum class Microbatch : int {};
inline constexpr Microbatch no_microbatch{-1};
[[nodiscard]] constexpr int index(Stage stage) noexcept { return static_cast<int>(stage); }
[[nodiscard]] constexpr int index(Microbatch microbatch) noexcept { return static_cast<int>(microbatch); }
inline std::ostream& operator<<(std::ostream& out, Stage stage) { return out << index(stage); }
inline std::ostream& operator<<(std::ostream& out, Microbatch microbatch) { return out << index(microbatch); }

// What a rank does with a stage. The first four are compute; the others appear when a schedule is lowered
// (graphs/schedule/lowering.hpp). Written as torch.distributed.pipelining writes them.
enum class ActionKind : std::uint8_t {
  forward,          // F
  input_gradient,   // I: the gradient that the stage before waits for
  weight_gradient,  // W: no other stage waits for it
  backward,         // B: I and W in one
  send_forward,     // SEND_F: the stage's output, to the next stage's rank
  recv_forward,     // RECV_F: the stage's input
  send_backward,    // SEND_B: the gradient of the stage's input, to the rank of the stage before
  recv_backward,    // RECV_B: the gradient of the stage's output
  unshard,          // UNSHARD: gather the stage's weights; this and the next two have no microbatch
  reshard,          // RESHARD: drop them
  reduce_grad,      // REDUCE_GRAD: reduce the stage's gradients over data-parallel ranks
};
inline constexpr std::size_t num_action_kinds = 11;
[[nodiscard]] std::string_view to_string(ActionKind kind) noexcept;
[[nodiscard]] constexpr bool is_compute(ActionKind kind) noexcept { return kind <= ActionKind::backward; }
[[nodiscard]] constexpr bool is_transfer(ActionKind kind) noexcept {
  return kind >= ActionKind::send_forward && kind <= ActionKind::recv_backward;
}
[[nodiscard]] constexpr bool has_microbatch(ActionKind kind) noexcept { return kind <= ActionKind::recv_backward; }

// Written "2F0": stage 2, forward, microbatch 0; "1UNSHARD" for one without a microbatch.
struct Action {
  Stage stage{};
  ActionKind kind                                       = ActionKind::forward;
  Microbatch microbatch                                 = no_microbatch;
  friend auto operator<=>(const Action&, const Action&) = default;
};
[[nodiscard]] std::string to_string(const Action& action);
[[nodiscard]] Action parse_action(std::string_view text);  // throws Error(config) that says what is wrong with it
inline std::ostream& operator<<(std::ostream& out, const Action& action) { return out << to_string(action); }

// The actions of each pipeline rank, in order. Plain data: it prints, parses and compares. `validate` checks that it
// can run (graphs/schedule/validate.hpp). Ranks here are pipeline ranks, 0 to P-1.
struct PipelineSchedule {
  std::vector<std::vector<Action>> rows = {};  // one row per pipeline rank: its actions in order
  std::vector<Rank> rank_of_stage       = {};  // [stage]: any placement; Rank{-1}: no rank has an action of it
  int num_microbatches                  = 0;

  [[nodiscard]] int num_ranks() const noexcept { return static_cast<int>(rows.size()); }
  [[nodiscard]] int num_stages() const noexcept { return static_cast<int>(rank_of_stage.size()); }
  [[nodiscard]] std::size_t num_actions() const noexcept;
  [[nodiscard]] std::vector<int> stages_per_rank() const;  // [rank]: its chunks
  friend bool operator==(const PipelineSchedule&, const PipelineSchedule&) = default;
};

// The most pairs of a stage and a microbatch that a schedule can have. Its graph then takes 1.6 GiB.
inline constexpr std::int64_t max_stage_microbatches = std::int64_t{1} << 21;

// A schedule from its rows alone: a stage belongs to the first rank that has an action of it; the largest numbers give
// the number of stages and of microbatches. Throws Error(config), naming row and column, when such a number is larger
// than the number of actions: a typing error must not allocate memory. `columns`: where each action stands in its row,
// counted from 1; none: one after another.
[[nodiscard]] PipelineSchedule schedule_of(std::vector<std::vector<Action>> rows,
                                           const std::vector<std::vector<std::size_t>>& columns = {});

// A line for each rank, actions parted by blanks: "0F0 0F1 0B0 0B1". Parsing gives back the schedule that was printed.
[[nodiscard]] std::string to_string(const PipelineSchedule& schedule);
[[nodiscard]] PipelineSchedule parse_schedule(std::string_view text);  // throws Error(config): row, column, reason
inline std::ostream& operator<<(std::ostream& out, const PipelineSchedule& schedule) {
  return out << to_string(schedule);
}

}  // namespace stepgraph
