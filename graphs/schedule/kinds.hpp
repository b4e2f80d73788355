#pragma once
#include <array>
#include <cstdint>
#include <ostream>
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
// zb kinds have I and W, the others B.
enum class ScheduleKind : std::uint8_t { round_robin, sequential, gpipe, one_f_one_b, interleaved, zb_h1, zb_h2 };
inline constexpr std::array all_schedule_kinds{
    ScheduleKind::round_robin, ScheduleKind::sequential, ScheduleKind::gpipe, ScheduleKind::one_f_one_b,
    ScheduleKind::interleaved, ScheduleKind::zb_h1,      ScheduleKind::zb_h2};
[[nodiscard]] std::string_view to_string(ScheduleKind kind) noexcept;   // "1f1b", as on the command line
[[nodiscard]] ScheduleKind parse_schedule_kind(std::string_view name);  // throws Error(config) that lists the names
inline std::ostream& operator<<(std::ostream& out, ScheduleKind kind) { return out << to_string(kind); }

struct ScheduleSpec {
  int ranks        = 1;
  int microbatches = 1;
  int chunks       = 1;  // stages of each rank
};

// Stage s is on rank s mod p. Any number of microbatches works, fewer than ranks as well, except that interleaved needs
// a multiple of the ranks when there are chunks; round_robin, sequential, gpipe and interleaved take any number of
// chunks, the others one. Throws Error(config) that says what is allowed.
[[nodiscard]] PipelineSchedule pipeline_schedule(ScheduleKind kind, const ScheduleSpec& spec);
// What pipeline_schedule refuses, without making one.
void check_schedule_spec(ScheduleKind kind, const ScheduleSpec& spec);

// Stage s on rank s mod ranks.
[[nodiscard]] std::vector<Rank> looped_placement(int ranks, int chunks);

}  // namespace stepgraph
