#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace stepgraph {

// The names that a mistyped name may mean, at most `most` of them, the nearest first; of equally near ones in the order
// given. Near is a small edit distance: letters changed, added, removed or swapped with their neighbour (Damerau 1964);
// capitals count as small letters. None where no name is near.
[[nodiscard]] std::vector<std::string_view> nearest_names(std::string_view given,
                                                          std::span<const std::string_view> names,
                                                          std::size_t most = 1);

// "did you mean tp? ", or empty.
[[nodiscard]] std::string did_you_mean(std::string_view given, std::span<const std::string_view> names);

}  // namespace stepgraph
