#include "engine/run/threads/tile_pieces.hpp"

#include <catch2/catch_test_macros.hpp>
#include <vector>

namespace sg = stepgraph;

TEST_CASE("a thread takes half of the tiles that are left in a share, within bounds", "[engine][executor]") {
  const auto sizes_of = [](sg::TilePieces pieces, std::int64_t left) {
    std::vector<std::int64_t> sizes;
    for (; left > 0; left -= sizes.back()) sizes.push_back(pieces.next(left));
    return sizes;
  };
  using Sizes = std::vector<std::int64_t>;
  CHECK(sizes_of(sg::pieces_of(64, 0, 16, 16), 4) == Sizes{1, 1, 1, 1});
  CHECK(sizes_of(sg::pieces_of(64, 16, 1, 1), 64) == Sizes{32, 32});
  CHECK(sizes_of(sg::pieces_of(64, 32, 2, 2), 32) == Sizes{32});
  CHECK(sizes_of(sg::pieces_of(64, 32, 3, 3), 22) == Sizes{11, 6, 3, 1, 1});
  CHECK(sizes_of(sg::pieces_of(64, 32, 2, 16), 32) == Sizes{16, 8, 4, 2, 2});
  CHECK(sizes_of(sg::pieces_of(64, 16, 1, 16), 64) == Sizes{32, 32});
  CHECK(sizes_of(sg::pieces_of(64, 16, 4, 4), 16) == Sizes{8, 4, 2, 1, 1});
  CHECK(sizes_of(sg::pieces_of(64, 16, 8, 8), 8) == Sizes{4, 2, 1, 1});
  CHECK(sizes_of(sg::pieces_of(64, 16, 16, 16), 4) == Sizes{2, 1, 1});
  CHECK(sizes_of(sg::pieces_of(64, 16, 64, 64), 1) == Sizes{1});
  CHECK(sizes_of(sg::pieces_of(1000, 16, 8, 8), 125) == Sizes{16, 16, 16, 16, 16, 16, 15, 7, 4, 2, 1});
}
