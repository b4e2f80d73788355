#pragma once
#include <algorithm>
#include <cassert>
#include <cstdint>
#include <numbers>
#include <type_traits>
#include <utility>

#include "ops/cpu/attention/attention.hpp"
#include "ops/cpu/gemm/small_product.hpp"

// Shared by forward and backward attention; internal to them. Tiles consist of whole blocks in both directions:
// elements beyond the sequence or the head are zero, so loops have no tail.
namespace stepgraph::cpu {
inline namespace STEPGRAPH_LEVEL {

[[nodiscard]] constexpr std::int64_t rounded_up(std::int64_t size, std::int64_t to) {
  return (size + to - 1) / to * to;
}

// Columns of a tile of queries, keys or values.
template <class W>
[[nodiscard]] std::int64_t padded_head(const AttentionShape& shape) {
  return rounded_up(shape.head_size, block_cols<W>);
}

// The distance between rows of a tile. Padding spreads a column of a tile over the sets and banks of a cache; other
// widths need none.
template <class W>
[[nodiscard]] std::int64_t tile_row(const AttentionShape& shape) {
  const std::int64_t padded = padded_head<W>(shape);
  return padded % 64 == 0 ? padded + 16 : padded;
}

// The rows of one head within a sequence.
template <class T>
struct HeadRows {
  T* data;
  std::int64_t stride;
};
template <class T>
[[nodiscard]] HeadRows<T> head_rows(T* rows, std::int64_t stride, std::int64_t head, std::int64_t head_size) {
  return {rows + head * head_size, stride};
}

// Rows of heads that are needed soon. They are far apart, so hardware prefetchers miss them. A processor waits when it
// has many lines to fetch, so a few lines are prefetched with each block of a product.
class RowsAhead {
 public:
  // Adds `size` elements of each of the rows [first, end).
  template <class T>
  void add(const HeadRows<T>& rows, std::int64_t size, std::int64_t first, std::int64_t end) {
    if (first >= end) return;
    assert(num_ranges_ < max_ranges);
    constexpr auto bytes         = static_cast<std::int64_t>(sizeof(T));
    const std::int64_t row_bytes = rounded_up(size * bytes, line);
    ranges_[num_ranges_++]       = {reinterpret_cast<const char*>(rows.data + first * rows.stride), rows.stride * bytes,
                                    row_bytes, end - first};
    num_lines_ += (end - first) * (row_bytes / line);
  }
  // Prefetches all lines in at most this many calls of prefetch_some.
  void spread_over(std::int64_t calls) { lines_per_call_ = (num_lines_ + calls - 1) / calls; }
  void prefetch_some() {
    const std::int64_t count = std::min(lines_per_call_, num_lines_);
    num_lines_ -= count;
    for (std::int64_t i = 0; i < count; ++i) {
      Range& range = ranges_[at_];
      __builtin_prefetch(range.row + byte_, 0, 2);
      byte_ += line;
      if (byte_ < range.row_bytes) continue;
      byte_ = 0;
      range.row += range.stride_bytes;
      if (--range.num_rows == 0) ++at_;
    }
  }

 private:
  static constexpr std::int64_t line = 64;
  struct Range {
    const char* row;
    std::int64_t stride_bytes, row_bytes, num_rows;
  };
  static constexpr int max_ranges = 7;  // of attention_backward.cpp
  Range ranges_[max_ranges];
  int num_ranges_ = 0, at_ = 0;
  std::int64_t byte_ = 0, num_lines_ = 0, lines_per_call_ = 0;
};

// Copies `rows` rows of a head, from `first` on, into a tile: widened, multiplied by a factor, padded with zeros.
template <class T>
void copy_tile(const HeadRows<const T>& from, const AttentionShape& shape, std::int64_t first, std::int64_t rows,
               Wide<T> factor, Wide<T>* to) {
  const std::int64_t size = shape.head_size, padded = padded_head<Wide<T>>(shape), to_row = tile_row<Wide<T>>(shape);
  const std::int64_t count = std::min(rows, shape.seq - first);
  for (std::int64_t r = 0; r < count; ++r) {
    const T* row = from.data + (first + r) * from.stride;
    Wide<T>* out = to + r * to_row;
    for (std::int64_t i = 0; i < size; ++i) out[i] = wide(row[i]) * factor;
    std::fill(out + size, out + padded, Wide<T>(0));
  }
  std::fill(to + count * to_row, to + rows * to_row, Wide<T>(0));
}

// Returns the rows themselves if they already form a tile, else a copy in `room`.
template <class T>
HeadRows<const Wide<T>> tile_rows(const HeadRows<const T>& from, const AttentionShape& shape, std::int64_t first,
                                  std::int64_t rows, Wide<T>* room) {
  const std::int64_t padded = padded_head<Wide<T>>(shape);
  if constexpr (std::is_same_v<T, Wide<T>>) {
    if (first + rows <= shape.seq && padded == shape.head_size) {
      return {from.data + first * from.stride, from.stride};
    }
  }
  copy_tile(from, shape, first, rows, Wide<T>(1), room);
  return {room, tile_row<Wide<T>>(shape)};
}

namespace detail {
typedef float Four __attribute__((vector_size(16)));                                  // NOLINT
typedef float FourUnaligned __attribute__((vector_size(16), aligned(1), may_alias));  // NOLINT

// Both vectors as one.
template <std::size_t... at>
[[gnu::always_inline]] inline auto joined(auto a, auto b, std::index_sequence<at...>) {
  return __builtin_shufflevector(a, b, at...);
}
// Four elements of each row 0, 4, ...: as many rows as fill a vector.
template <int rows = lanes_of<float> / 4>
[[gnu::always_inline]] inline auto load_fours(const float* from, std::int64_t stride) {
  if constexpr (rows == 1) {
    return Four(*reinterpret_cast<const FourUnaligned*>(from));
  } else {
    return joined(load_fours<rows / 2>(from, stride), load_fours<rows / 2>(from + 2 * rows * stride, stride),
                  std::make_index_sequence<static_cast<std::size_t>(4 * rows)>{});
  }
}
// Within each four lanes: a[first], b[first], a[first + 1], b[first + 1].
template <int first, std::size_t... lane>
[[gnu::always_inline]] inline Vector<float> zipped(Vector<float> a, Vector<float> b, std::index_sequence<lane...>) {
  return __builtin_shufflevector(a, b, (lane / 4 * 4 + first + lane % 4 / 2 + lane % 2 * sizeof...(lane))...);
}
}  // namespace detail

// to[i][r] = from[r][i] * factor. Rows of `to` are `to_row` elements apart. There are whole vectors of rows, and
// columns are a multiple of 4.
template <class W>
void transpose(const HeadRows<const W>& from, std::int64_t rows, std::int64_t cols, W factor, W* to,
               std::int64_t to_row) {
  if constexpr (std::is_same_v<W, float>) {
    constexpr auto lanes = std::make_index_sequence<lanes_of<float>>{};
    for (std::int64_t i = 0; i < cols; i += 4) {
      for (std::int64_t r = 0; r < rows; r += lanes_of<float>) {
        const auto load = [&](std::int64_t row) {
          return detail::load_fours(from.data + (r + row) * from.stride + i, from.stride);
        };
        const auto a = load(0), b = load(1), c = load(2), d = load(3);
        const auto ac_low = detail::zipped<0>(a, c, lanes), bd_low = detail::zipped<0>(b, d, lanes),
                   ac_high = detail::zipped<2>(a, c, lanes), bd_high = detail::zipped<2>(b, d, lanes);
        float* out = to + i * to_row + r;
        store_vector<float>(out, detail::zipped<0>(ac_low, bd_low, lanes) * factor);
        store_vector<float>(out + to_row, detail::zipped<2>(ac_low, bd_low, lanes) * factor);
        store_vector<float>(out + 2 * to_row, detail::zipped<0>(ac_high, bd_high, lanes) * factor);
        store_vector<float>(out + 3 * to_row, detail::zipped<2>(ac_high, bd_high, lanes) * factor);
      }
    }
  } else {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < cols; ++i) to[i * to_row + r] = from.data[r * from.stride + i] * factor;
    }
  }
}

// The factor of the scores for which probabilities are powers of two.
template <class W>
[[nodiscard]] W binary_scale(const AttentionShape& shape) {
  return static_cast<W>(shape.scale * std::numbers::log2e);
}

// The factors by which dropout multiplies the probabilities of a tile.
struct TileMask {
  DropoutMask mask;
  std::int64_t first;  // index of the probability of the tile's first query and first key

  // Calls with_factor(row, col, factor) for the rows x cols of the tile. Indices grow by `row_step` from row to row and
  // by `col_step` from column to column: for queries that is the length of the sequence, for keys 1.
  template <class W, class WithFactor>
  void apply(std::int64_t rows, std::int64_t row_step, std::int64_t cols, std::int64_t col_step,
             const WithFactor& with_factor) const {
    const auto scale         = static_cast<W>(mask.scale);
    const std::int64_t last  = first + (rows - 1) * row_step + (cols - 1) * col_step;
    const bool one_block     = first >> 32 == last >> 32;
    const DropoutBlock block = mask.block(static_cast<std::uint64_t>(first));
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t number = first + r * row_step;
      if (one_block) {
        const auto low = static_cast<std::uint32_t>(number), step = static_cast<std::uint32_t>(col_step);
        for (std::uint32_t c = 0; c < static_cast<std::uint32_t>(cols); ++c) {
          with_factor(r, std::int64_t{c}, block.keeps(low + c * step) ? scale : W(0));
        }
      } else {
        for (std::int64_t c = 0; c < cols; ++c) {
          with_factor(r, c, mask.keeps(static_cast<std::uint64_t>(number + c * col_step)) ? scale : W(0));
        }
      }
    }
  }
};

// The mask of the tile that starts at first_query and first_key.
[[nodiscard]] inline TileMask tile_mask(const AttentionDropout& dropout, const AttentionShape& shape,
                                        std::int64_t sequence, std::int64_t head, std::int64_t first_query,
                                        std::int64_t first_key) {
  const std::int64_t heads_before = (dropout.first_sequence + sequence) * dropout.all_heads + dropout.first_head + head;
  return {dropout.mask, (heads_before * shape.seq + first_query) * shape.seq + first_key};
}

}  // namespace STEPGRAPH_LEVEL
}  // namespace stepgraph::cpu
