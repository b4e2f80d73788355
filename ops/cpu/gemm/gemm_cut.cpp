#include "ops/cpu/gemm/gemm_cut.hpp"

#include <algorithm>
#include <bit>

namespace stepgraph::cpu {
namespace {

std::int64_t pieces(std::int64_t size, std::int64_t piece) { return (size + piece - 1) / piece; }

// Where part `part` of `parts` begins. Multiples of the register blocks of most kernels.
std::int64_t begin_of(std::int64_t size, std::int64_t part, std::int64_t parts, std::int64_t block) {
  return part == parts ? size : std::min(size, (size * part / parts + block / 2) / block * block);
}

}  // namespace

GemmCut::GemmCut(std::int64_t m, std::int64_t n, int most_cuts) : m_(m), n_(n), can_join_(most_cuts > 0) {
  // Large tiles are wide rather than tall, which packs less. There are at least two for two threads, and more where
  // that costs almost nothing.
  constexpr std::int64_t worth_cutting = 96 * 96, worth_four = 512 * 768, most = 1024 * 1024, smallest = 32 * 64;
  std::int64_t rows = m, cols = n;
  const auto too_large = [&] {
    const std::int64_t area = rows * cols, tiles = num_tiles();
    return area > most || (tiles < 4 && area / 2 >= worth_four) || (tiles < 2 && area > worth_cutting);
  };
  while (too_large()) halve(rows, cols);
  large_cuts_ = cuts_;
  while (cuts_ > 0 && cuts_ < most_cuts && rows * cols >= 2 * smallest) halve(rows, cols);
}

void GemmCut::halve(std::int64_t& rows, std::int64_t& cols) noexcept {
  const bool high = rows > 512 ? 4 * rows > cols : rows > cols;
  if (high) by_rows_ |= std::uint64_t{1} << cuts_;
  (high ? down_ : across_) *= 2;
  ++cuts_;
  rows = pieces(pieces(m_, down_), 8) * 8;
  cols = pieces(pieces(n_, across_), 8) * 8;
}

GemmCut::Joined GemmCut::from(std::int64_t first, std::int64_t end) const noexcept {
  int doubled = 0;
  if (can_join_) {
    doubled = first == 0 ? cuts_ : std::countr_zero(static_cast<std::uint64_t>(first));
    while (first + (std::int64_t{1} << doubled) > end) --doubled;
  }
  return {range(first, doubled), std::int64_t{1} << doubled};
}

Range GemmCut::range(std::int64_t first, int doubled) const noexcept {
  std::int64_t row = 0, col = 0, down = 1, across = 1;
  for (int cut = 0; cut < cuts_ - doubled; ++cut) {
    const std::int64_t second = first >> (cuts_ - 1 - cut) & 1;
    const bool high           = by_rows_ >> cut & 1;
    (high ? row : col)        = 2 * (high ? row : col) + second;
    (high ? down : across) *= 2;
  }
  const std::int64_t top = begin_of(m_, row, down, 8), left = begin_of(n_, col, across, 16);
  return {top, left, begin_of(m_, row + 1, down, 8) - top, begin_of(n_, col + 1, across, 16) - left};
}

}  // namespace stepgraph::cpu
