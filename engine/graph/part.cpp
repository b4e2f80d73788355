#include "engine/graph/part.hpp"

#include <algorithm>
#include <array>

namespace stepgraph {

int member_of(const GroupSpec& group, Rank rank) {
  return static_cast<int>(group.ranks.find(rank).value_or(group.ranks.size()));
}

std::string_view to_string(PartOp op) noexcept {
  constexpr std::array<std::string_view, 12> names{"all_reduce", "reduce",  "all_gather", "reduce_scatter",
                                                   "broadcast",  "scatter", "gather",     "all_to_all",
                                                   "permute",    "barrier", "send",       "recv"};
  return names[static_cast<std::size_t>(op)];
}

}  // namespace stepgraph
