#include "ops/cpu/residual.hpp"

#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"
#include "ops/cpu/with_best.hpp"

namespace stepgraph::cpu {
namespace {

// out[i] = x[i] + summand(i), instantiated for each kind of summand.
template <class T, class Summand>
void add(const T* __restrict x, T* __restrict out, std::int64_t size, const Summand& summand) {
  for (std::int64_t i = 0; i < size; ++i) out[i] = narrow<T>(wide(x[i]) + summand(i));
}

template <class T, class Branch>
void add_row(const ResidualRows<T>& rows, std::int64_t row, const Branch& branch) {
  const std::int64_t at = row * rows.width;
  if (!rows.drop) return add(rows.x + at, rows.y + at, rows.width, branch);
  const auto scale = static_cast<Wide<T>>(rows.drop->mask.scale);
  rows.drop->mask.for_pieces(rows.drop->first + at, rows.width,
                             [&](const DropoutBlock& block, std::uint32_t low, std::int64_t begin, std::int64_t count) {
                               add(rows.x + at + begin, rows.y + at + begin, count, [&](std::int64_t i) {
                                 const Wide<T> kept = branch(begin + i) * scale;
                                 return block.keeps(low + static_cast<std::uint32_t>(i)) ? kept : Wide<T>(0);
                               });
                             });
}

template <class T>
void forward(const ResidualRows<T>& rows, std::int64_t begin_row, std::int64_t end_row) {
  const T* bias = rows.bias;
  for (std::int64_t row = begin_row; row < end_row; ++row) {
    const T* branch = rows.branch + row * rows.width;
    if (bias == nullptr) {
      add_row(rows, row, [branch](std::int64_t i) { return wide(branch[i]); });
    } else {
      add_row(rows, row, [branch, bias](std::int64_t i) { return wide(branch[i]) + wide(bias[i]); });
    }
  }
}

template <class T>
void put_kept(const Drop& drop, const T* from, const Into<T>& into, std::int64_t begin, std::int64_t end) {
  const auto scale = static_cast<Wide<T>>(drop.mask.scale);
  drop.mask.for_pieces(drop.first + begin, end - begin,
                       [&](DropoutBlock block, std::uint32_t low, std::int64_t first, std::int64_t count) {
                         const T* at = from + begin + first;
                         put(into, begin + first, count, [=](std::int64_t i) {
                           const Wide<T> kept = wide(at[i]) * scale;
                           return block.keeps(low + static_cast<std::uint32_t>(i)) ? kept : Wide<T>(0);
                         });
                       });
}

template <class T>
void sum_columns(const T* dy, std::int64_t width, const std::optional<Drop>& drop, const Into<T, Wide<T>>& into,
                 std::int64_t rows, std::int64_t begin, std::int64_t end) {
  using W                 = Wide<T>;
  const std::int64_t size = end - begin;
  ColumnParts<W> columns;
  if (!drop) {
    columns.add_rows(rows, size, [=](std::int64_t row) {
      return [at = dy + row * width + begin](std::int64_t c) { return wide(at[c]); };
    });
  } else {
    W dropped[4][columns_per_tile];  // of the four rows that are added at a time
    columns.add_rows(rows, size, [&](std::int64_t row) {
      const Into<W> kept{dropped[row % 4], nullptr, size};
      W* at         = dropped[row % 4];
      const T* from = dy + row * width + begin;
      for (std::int64_t c = 0; c < size; ++c) at[c] = wide(from[c]);
      put_kept<W>({.mask = drop->mask, .first = drop->first + row * width + begin}, at, kept, 0, size);
      return [at](std::int64_t c) { return at[c]; };
    });
  }
  put(into, begin, size, [&](std::int64_t c) { return static_cast<W>(columns.sums[c]); });
}

}  // namespace

template <class T>
void residual_forward(const ResidualRows<T>& rows, std::int64_t begin_row, std::int64_t end_row) {
  with_best([&] { forward(rows, begin_row, end_row); });
}
template <class T>
void put_dropped(const Drop& drop, const T* from, const Into<T>& into, std::int64_t begin, std::int64_t end) {
  with_best([&] { put_kept(drop, from, into, begin, end); });
}
template <class T>
void column_sum(const T* dy, std::int64_t width, const std::optional<Drop>& drop, const Into<T, Wide<T>>& into,
                std::int64_t rows, std::int64_t begin, std::int64_t end) {
  with_best([&] { sum_columns(dy, width, drop, into, rows, begin, end); });
}

#define STEPGRAPH_RESIDUAL(T)                                                                              \
  template void residual_forward<T>(const ResidualRows<T>&, std::int64_t, std::int64_t);                   \
  template void put_dropped<T>(const Drop&, const T*, const Into<T>&, std::int64_t, std::int64_t);         \
  template void column_sum<T>(const T*, std::int64_t, const std::optional<Drop>&, const Into<T, Wide<T>>&, \
                              std::int64_t, std::int64_t, std::int64_t)
STEPGRAPH_RESIDUAL(float);
STEPGRAPH_RESIDUAL(double);
STEPGRAPH_RESIDUAL(bf16);
STEPGRAPH_RESIDUAL(f16);
#undef STEPGRAPH_RESIDUAL

}  // namespace stepgraph::cpu
