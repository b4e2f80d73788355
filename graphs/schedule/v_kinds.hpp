#pragma once
#include <vector>

#include "graphs/schedule/schedule.hpp"

// The kinds whose placement is a V: rank s of p has stages s (chunk 0) and 2p - 1 - s (chunk 1). Each function returns
// the rows of the schedule. ranks and microbatches are 1 or more.
namespace stepgraph {

[[nodiscard]] std::vector<std::vector<Action>> zb_v(int ranks, int microbatches);
[[nodiscard]] std::vector<std::vector<Action>> dualpipe_v(int ranks, int microbatches);
[[nodiscard]] std::vector<std::vector<Action>> v_half(int ranks, int microbatches);
[[nodiscard]] std::vector<std::vector<Action>> v_min(int ranks, int microbatches);

}  // namespace stepgraph
