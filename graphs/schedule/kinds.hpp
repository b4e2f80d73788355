#pragma once
#include <array>
#include <cstdint>
#include <ostream>
#include <span>
#include <string_view>
#include <vector>

#include "graphs/schedule/schedule.hpp"

namespace stepgraph {

// Orders that are known in closed form. p ranks, rank s of them, m microbatches.
//
//   round_robin  each microbatch through all stages and back before the next
//   sequential   all forwards, then all backwards, last microbatch first
//   gpipe        all forwards, then all backwards, first microbatch first (Huang et al. 2019)
//   one_f_one_b  p - s forwards, then a backward and a forward in turn (PipeDream-Flush): holds at most p - s
//                microbatches
//   interleaved  several chunks to a rank, taken in groups of p microbatches (Megatron-LM, SC 2021). With one chunk it
//                is one_f_one_b, as in Megatron-LM
//   zb_h1        one_f_one_b with the backward split; W of rank s comes s microbatches late, to fill the end (Zero
//                Bubble, ICLR 2024): holds at most p
//   zb_h2        2(p - s) - 1 forwards first and W 2s late: no bubble in the beginning either; holds at most 2p - 1
//
// Kinds with two stages to a rank, in V placement: rank s has stages s and 2p - 1 - s.
//
//   zb_v         no bubble where F = I = W, and 2p microbatches or more (Zero Bubble, section 6): holds at most p
//   v_half       repeats a block that holds about half of what one_f_one_b holds: (p + 2) / 2 (Controllable Memory,
//                Qi et al. 2024)
//   v_min        likewise a third: about (p + 4) / 3
//   dualpipe_v   a forward of one chunk next to a backward of the other (DeepSeek's DualPipe, cut in half): holds at
//                most p + 1/2
//
// zb and v kinds have I and W, dualpipe_v has B as well; the others have B.
enum class ScheduleKind : std::uint8_t {
  round_robin,
  sequential,
  gpipe,
  one_f_one_b,
  interleaved,
  zb_h1,
  zb_h2,
  zb_v,
  v_half,
  v_min,
  dualpipe_v,
};
inline constexpr std::array all_schedule_kinds{
    ScheduleKind::round_robin, ScheduleKind::sequential, ScheduleKind::gpipe,     ScheduleKind::one_f_one_b,
    ScheduleKind::interleaved, ScheduleKind::zb_h1,      ScheduleKind::zb_h2,     ScheduleKind::zb_v,
    ScheduleKind::v_half,      ScheduleKind::v_min,      ScheduleKind::dualpipe_v};
[[nodiscard]] constexpr bool is_v_shaped(ScheduleKind kind) noexcept { return kind >= ScheduleKind::zb_v; }
// The chunks that a kind has where no number is given: 2 in V placement, otherwise 1.
[[nodiscard]] constexpr int usual_chunks(ScheduleKind kind) noexcept { return is_v_shaped(kind) ? 2 : 1; }
[[nodiscard]] std::string_view to_string(ScheduleKind kind) noexcept;  // "1f1b", as on the command line
// Throws Error(config) that lists all names, and `others`: further names that can stand in its place.
[[nodiscard]] ScheduleKind parse_schedule_kind(std::string_view name, std::span<const std::string_view> others = {});
inline std::ostream& operator<<(std::ostream& out, ScheduleKind kind) { return out << to_string(kind); }

struct ScheduleSpec {
  int ranks        = 1;
  int microbatches = 1;
  int chunks       = 0;  // stages of each rank; 0: as many as usual_chunks says
};

// Any number of microbatches works, fewer than ranks as well, except that interleaved needs a multiple of the ranks
// when there are chunks; round_robin, sequential, gpipe and interleaved take any number of chunks, V-shaped kinds two,
// the others one. Throws Error(config) that says what is allowed.
[[nodiscard]] PipelineSchedule pipeline_schedule(ScheduleKind kind, const ScheduleSpec& spec);
// What pipeline_schedule refuses, without making one.
void check_schedule_spec(ScheduleKind kind, const ScheduleSpec& spec);

// Stage s on rank s mod ranks.
[[nodiscard]] std::vector<Rank> looped_placement(int ranks, int chunks);
// Two stages to a rank: 0 to ranks - 1 down, and back up.
[[nodiscard]] std::vector<Rank> v_placement(int ranks);
// The placement of a kind's stages; chunks as in ScheduleSpec.
[[nodiscard]] std::vector<Rank> placement_of(ScheduleKind kind, int ranks, int chunks = 0);

}  // namespace stepgraph
