#pragma once
#include <algorithm>
#include <cstdint>

#include "engine/run/context.hpp"
#include "ops/tape/tensor.hpp"
// Compiled for the instructions of the level:
#include "ops/cpu/lanes.hpp"

namespace stepgraph::cpu {
inline namespace STEPGRAPH_LEVEL {

// Elements [begin, begin + size) of a sum: base + value(i), where i counts from `begin`. Each of the three cases has
// its own loop, so that compilers can vectorise it without an alias check of base and out.
template <class T, class Sum, class Value>
inline void put(const Into<T, Sum>& into, std::int64_t begin, std::int64_t size, const Value& value) {
  Sum* out = into.out + begin;
  if (into.base == nullptr) {
    for (std::int64_t i = 0; i < size; ++i) out[i] = narrow<Sum>(value(i));
  } else if (into.base == into.out) {
    for (std::int64_t i = 0; i < size; ++i) out[i] = narrow<Sum>(wide(out[i]) + value(i));
  } else {
    const Sum* base = into.base + begin;
    for (std::int64_t i = 0; i < size; ++i) out[i] = narrow<Sum>(wide(base[i]) + value(i));
  }
}

// Calls body(begin, end) for ranges of `tile` that cover [0, size), in parallel if there are several. The node must be
// declared parallel. The ranges do not depend on the number of threads.
template <class Range>
inline void for_tiles(const Context& context, std::int64_t size, std::int64_t tile, const Range& body) {
  if (size <= tile) {
    if (size > 0) body(std::int64_t{0}, size);
    return;
  }
  context.parallel_for((size + tile - 1) / tile,
                       [&](std::int64_t i) { body(i * tile, std::min(size, (i + 1) * tile)); });
}

// The same for columns of a matrix that are summed: body(begin, end) gets at most columns_per_tile. Where there are
// more threads than such tiles, it gets fewer, down to two cache lines of f32; a column's bits do not depend on it.
template <class Range>
inline void for_columns(const Context& context, std::int64_t columns, const Range& body) {
  constexpr std::int64_t narrow_tile = 32;
  if (columns <= columns_per_tile) {
    if (columns > 0) body(std::int64_t{0}, columns);
    return;
  }
  context.parallel_for((columns + narrow_tile - 1) / narrow_tile, columns_per_tile / narrow_tile,
                       [&](std::int64_t first, std::int64_t end) {
                         const std::int64_t last = std::min(columns, end * narrow_tile);
                         for (std::int64_t at = first * narrow_tile; at < last; at += columns_per_tile)
                           body(at, std::min(last, at + columns_per_tile));
                       });
}

// Elements per tile of an elementwise operation.
inline constexpr std::int64_t elements_per_tile = 16384;
// The number of rows of `cols` elements per tile.
[[nodiscard]] inline std::int64_t rows_per_tile(std::int64_t cols) {
  return std::max<std::int64_t>(1, elements_per_tile / std::max<std::int64_t>(1, cols));
}

}  // namespace STEPGRAPH_LEVEL
}  // namespace stepgraph::cpu
