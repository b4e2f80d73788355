#pragma once
#include <cstdint>

namespace stepgraph {

// How many neighbouring tiles a thread takes from a share in one call: half of those that are left, but not fewer than
// `least` and not more than `most`.
struct TilePieces {
  std::int64_t least = 1, most = 1;
  [[nodiscard]] std::int64_t next(std::int64_t left) const noexcept;
};

// For a kernel that gets `num_threads` of `all_threads` and prefers calls with `joined` tiles (0: with one). A call has
// at most `joined` tiles, in equal parts of a thread's share. With more than two threads in all, the last calls of a
// share are smaller, because threads are not equally fast and do not come at the same time. A thread that is alone
// computes twice as many tiles in a call.
[[nodiscard]] TilePieces pieces_of(std::int64_t num_tiles, std::int64_t joined, int num_threads,
                                   int all_threads) noexcept;

}  // namespace stepgraph
