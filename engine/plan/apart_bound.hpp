#pragma once
#include <cstdint>
#include <vector>

#include "engine/plan/first_fit.hpp"

namespace stepgraph {

// Bytes of items of which no two may share a byte: their lifetimes overlap, or `apart` has the pair. No packing is
// smaller. In training steps such a set is often as large as the best packing that is found. The search for it begins
// with all items that are alive at one turn, and adds the largest items that may share with none of the set; the turns
// with most bytes are tried. At least most_at_once(items). Internal to engine/.
[[nodiscard]] std::int64_t most_apart(const std::vector<PackItem>& items, const ItemPairs& apart);

}  // namespace stepgraph
