#include "engine/run/threads/tile_pieces.hpp"

#include <algorithm>

namespace stepgraph {

std::int64_t TilePieces::next(std::int64_t left) const noexcept {
  return std::min(left, std::clamp((left + 1) / 2, least, most));
}

TilePieces pieces_of(std::int64_t num_tiles, std::int64_t joined, int num_threads, int all_threads) noexcept {
  if (joined < 1) return {1, 1};
  if (num_threads == 1) return {2 * joined, 2 * joined};
  const std::int64_t share = (num_tiles + num_threads - 1) / num_threads, calls = (share + joined - 1) / joined;
  const std::int64_t most = (share + calls - 1) / calls;
  return {all_threads > 2 ? std::max<std::int64_t>(1, most / 16) : most, most};
}

}  // namespace stepgraph
