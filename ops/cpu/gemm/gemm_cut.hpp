#pragma once
#include <cstdint>

// How the result of a matrix product is cut into tiles, by its shape alone. Internal to ops/.
namespace stepgraph::cpu {

// A tile or a block of it: its start and its size.
struct Range {
  std::int64_t row, col, rows, cols;
};

// [m, n] is halved again and again, by rows or by columns. The bits of a tile's number say which halves it is in; the
// highest bit is that of the first cut. So each aligned power of two of neighbours is a rectangle.
class GemmCut {
 public:
  // Tiles that can be joined are cut further until there are 2^most_cuts or they are small. With 0 they cannot be
  // joined and stay large, enough for few threads.
  GemmCut(std::int64_t m, std::int64_t n, int most_cuts);
  [[nodiscard]] std::int64_t num_tiles() const noexcept { return std::int64_t{1} << cuts_; }
  // How many neighbours make a large tile. Operands are packed again for each tile.
  [[nodiscard]] std::int64_t joined() const noexcept { return std::int64_t{1} << (cuts_ - large_cuts_); }
  // The rectangle of the most tiles from `first` on that ends at `end` or before, and their number.
  struct Joined {
    Range range;
    std::int64_t num_tiles;
  };
  [[nodiscard]] Joined from(std::int64_t first, std::int64_t end) const noexcept;

 private:
  void halve(std::int64_t& rows, std::int64_t& cols) noexcept;
  [[nodiscard]] Range range(std::int64_t first, int doubled) const noexcept;

  std::int64_t m_, n_, down_ = 1, across_ = 1;
  bool can_join_;
  int large_cuts_ = 0, cuts_ = 0;  // into large tiles; into all tiles
  std::uint64_t by_rows_ = 0;      // bit i: cut i is by rows
};

}  // namespace stepgraph::cpu
