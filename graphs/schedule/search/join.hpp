#pragma once
#include <functional>
#include <vector>

#include "graphs/schedule/search/rows.hpp"

namespace stepgraph::search {

// The places of I that can be joined with the W after them to B: neither the longest span nor the makespan grows. As
// many as a greedy choice finds before `stop` ends it. [rank * length + position].
[[nodiscard]] std::vector<bool> joinable(
    const Setting& setting, const Rows& rows, const std::function<bool()>& stop = [] { return false; });

}  // namespace stepgraph::search
