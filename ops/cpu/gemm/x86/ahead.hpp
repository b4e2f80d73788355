#pragma once
#include <cstdint>

#include "ops/cpu/gemm/x86/pack.hpp"

// Everything is in an anonymous namespace, because each file that includes this header compiles it for other
// instructions.
namespace stepgraph::cpu {
namespace {

// Operands that are packed next. While a block is multiplied, their lines come into the second-level cache one by one:
// packing would wait for each of them.
class LinesAhead {
 public:
  LinesAhead() = default;  // none
  // A part of an operand, while `num_blocks` register blocks are multiplied. Either lanes or steps are adjacent; for
  // other strides there are no lines.
  template <class T>
  LinesAhead(const OperandPart<T>& part, std::int64_t num_blocks) {
    const auto [from, across, along, lanes, depth] = part;
    if (across != 1 && along != 1) return;
    constexpr auto size       = static_cast<std::int64_t>(sizeof(T));
    const bool steps_adjacent = along == 1;
    const std::int64_t rows   = steps_adjacent ? lanes : depth;
    const std::int64_t lines  = ((steps_adjacent ? depth : lanes) * size + line - 1) / line;
    next_                     = reinterpret_cast<const char*>(from);
    row_bytes_                = lines * line;
    row_end_                  = next_ + row_bytes_;
    jump_                     = (steps_adjacent ? across : along) * size - row_bytes_;
    lines_left_               = rows * lines;
    lines_per_block_          = (lines_left_ + num_blocks - 1) / num_blocks;
  }

  // How many lines the next register block should fetch, if it has room for `most`.
  std::int64_t take(std::int64_t most) {
    const std::int64_t count = least(most, least(lines_per_block_, lines_left_));
    lines_left_ -= count;
    return count;
  }
  void fetch() {  // the next line, into the second-level cache
    __builtin_prefetch(next_, 0, 2);
    next_ += line;
    if (next_ != row_end_) return;
    next_ += jump_;
    row_end_ = next_ + row_bytes_;
  }

 private:
  static constexpr std::int64_t line = 64;

  const char *next_ = nullptr, *row_end_ = nullptr;
  std::int64_t row_bytes_ = 0, jump_ = 0;  // from the end of a row to the beginning of the next one
  std::int64_t lines_left_ = 0, lines_per_block_ = 0;
};

}  // namespace
}  // namespace stepgraph::cpu
