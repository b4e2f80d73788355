#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <utility>

#include "engine/run/context.hpp"
#include "ops/cpu/attention/attention_levels.hpp"
#include "ops/cpu/level.hpp"
// Compiled for the instructions of the level:
#include "ops/cpu/attention/attention_tiles.hpp"
#include "ops/cpu/elementary.hpp"
#include "ops/cpu/into.hpp"

// With P the probabilities and Z the dropout factors: dV = (P Z)^T dO; dP = (dO V^T) Z; dS = P (dP - rowsum(dO O)); dQ
// = scale dS K; dK = scale dS^T Q (FlashAttention-2, section 2.3.2). The outer loop is over tiles of keys, the inner
// one over tiles of queries.
namespace stepgraph::cpu {
namespace {

// Every tile of queries is prepared once per tile of keys, so tiles of keys are larger.
constexpr std::int64_t query_tile = 64, key_tile = 128;

// Sizes of tiles.
template <class W>
struct Sizes {
  std::int64_t num_keys, num_queries;  // rows of a tile; a short sequence needs fewer
  std::int64_t row, score_row;         // the distance between rows: of queries, keys or values; of scores, padded alike
  std::int64_t across;                 // elements of a transposed tile of keys or values

  explicit Sizes(const AttentionShape& shape)
      : num_keys(std::min(key_tile, rounded_up(shape.seq, block_cols<W>))),
        num_queries(std::min(query_tile, rounded_up(shape.seq, last_rows))),
        row(tile_row<W>(shape)),
        score_row(num_keys == key_tile ? key_tile + 16 : num_keys),
        across(num_keys * padded_head<W>(shape)) {}
  // Elements of all rooms except d_queries.
  [[nodiscard]] std::int64_t all() const {
    return (3 * num_keys + 2 * num_queries) * row + 2 * across + 2 * num_queries * score_row;
  }
};

// Parts of the workspace.
template <class W>
struct Rooms : Sizes<W> {
  W *keys, *keys_across, *values_across, *d_keys, *d_values;  // for a tile of keys; `across`: transposed, in panels
  W *queries, *d_out;                                         // for a tile of queries
  W *scores, *d_scores;                                       // for both: one query per row
  W* d_queries;                                               // a panel of the whole sequence, if needed

  Rooms(const Sizes<W>& sizes, W* workspace)
      : Sizes<W>(sizes),
        keys(workspace),
        keys_across(keys + sizes.num_keys * sizes.row),
        values_across(keys_across + sizes.across),
        d_keys(values_across + sizes.across),
        d_values(d_keys + sizes.num_keys * sizes.row),
        queries(d_values + sizes.num_keys * sizes.row),
        d_out(queries + sizes.num_queries * sizes.row),
        scores(d_out + sizes.num_queries * sizes.row),
        d_scores(scores + sizes.num_queries * sizes.score_row),
        d_queries(workspace + sizes.all()) {}
};

// Whether gradients of queries are summed in place. Their blocks must be whole.
template <class T>
bool sums_in_place(const AttentionShape& shape) {
  return std::is_same_v<T, Wide<T>> && shape.head_size == padded_head<Wide<T>>(shape) && shape.seq % last_rows == 0;
}

// `count` elements, and zeros up to a whole vector.
template <class T>
[[gnu::always_inline]] inline Vector<Wide<T>> load_wide(const T* from, std::int64_t count) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    if (count == lanes_of<T>) return load_vector(from);
  }
  Vector<Wide<T>> made = {};
  for (std::int64_t lane = 0; lane < count; ++lane) made[lane] = wide(from[lane]);
  return made;
}

// Adds the lane `distance` lanes further on to each of the first lanes, and so on with half the distance.
template <std::size_t distance, class V, std::size_t... lane>
[[gnu::always_inline]] inline V with_lanes_added(V values, std::index_sequence<lane...> all) {
  if constexpr (distance == 0) {
    return values;
  } else {
    values += __builtin_shufflevector(values, values, ((lane + distance) % sizeof...(lane))...);
    return with_lanes_added<distance / 2>(values, all);
  }
}

// a[0] b[0] + a[1] b[1] + ..., summed as lane_sum (ops/cpu/lanes.hpp) does. Partial sums stay in registers, because rows
// of a head are short.
template <class T>
[[nodiscard]] Wide<T> dot(const T* a, const Wide<T>* b, std::int64_t size) {
  using W                    = Wide<T>;
  constexpr int lanes        = lanes_of<W>;
  Vector<W> sums[16 / lanes] = {};
  for (std::int64_t i = 0; i < size; i += 16) {
    for (int v = 0; v < 16 / lanes; ++v) {
      const std::int64_t at = i + v * lanes, count = std::clamp<std::int64_t>(size - at, 0, lanes);
      sums[v] += load_wide(a + at, count) * load_wide(b + at, count);
    }
  }
  for (int half = 8 / lanes; half > 0; half /= 2) {
    for (int v = 0; v < half; ++v) sums[v] += sums[v + half];
  }
  return with_lanes_added<lanes / 2>(sums[0], std::make_index_sequence<static_cast<std::size_t>(lanes)>{})[0];
}

// One sequence and one query head.
template <class T>
struct Head {
  using W = Wide<T>;
  const AttentionBackward<T>& attention;
  Rooms<W> rooms;
  std::int64_t sequence, head;
  T* d_qkv;  // of the sequence
  HeadRows<W> d_queries;
  bool starts_keys, starts_queries;  // whether sums start here: of a tile of keys; of queries, with its first tile

  // Adds the contributions of one tile of queries and one tile of keys to each other's gradients.
  void add(std::int64_t first, std::int64_t first_key) const;

 private:
  [[nodiscard]] RowsAhead rows_ahead(std::int64_t first, std::int64_t first_key) const;
  void set_products(std::int64_t first, std::int64_t count) const;
  void to_gradients(std::int64_t first, std::int64_t first_key, std::int64_t query) const;
};

template <class T>
void Head<T>::add(std::int64_t first, std::int64_t first_key) const {
  const AttentionShape& shape = attention.shape;
  const std::int64_t size = shape.head_size, padded = padded_head<W>(shape), row = tile_row<W>(shape);
  const std::int64_t before = sequence * shape.seq;  // rows of earlier sequences
  const std::int64_t count = std::min(query_tile, shape.seq - first), end = rounded_up(count, last_rows);
  const auto queries = head_rows(attention.qkv + before * shape.qkv_row(), shape.qkv_row(), head, size);
  const auto d_out   = head_rows(attention.d_out + before * shape.out_row(), shape.out_row(), head, size);
  RowsAhead ahead    = rows_ahead(first, first_key);
  copy_tile(queries, shape, first, rooms.num_queries, W(1), rooms.queries);
  copy_tile(d_out, shape, first, rooms.num_queries, W(1), rooms.d_out);
  if (first_key == 0) set_products(first, count);
  const std::int64_t later = first - first_key;                // of the tile's first query than its first key
  const std::int64_t keys  = std::min(key_tile, later + end);  // that a query of the tile attends to
  const auto score         = [&](const W* rows, const W* columns, W* scores) {
    const Product<W> product{rows, row, columns, block_cols<W>, block_cols<W> * padded, scores, rooms.score_row};
    const auto steps = [&](std::int64_t query, std::int64_t in_block, std::int64_t key) {
      ahead.prefetch_some();
      return Steps{0, later + query + in_block > key ? padded : 0};
    };
    multiply<Left::rows>(product, end, rounded_up(keys, block_cols<W>), steps,
                         [](W* to, std::int64_t, std::int64_t, Vector<W> sum) { store_vector(to, sum); });
  };
  score(rooms.queries, rooms.keys_across, rooms.scores);
  score(rooms.d_out, rooms.values_across, rooms.d_scores);
  for (std::int64_t query = 0; query < end; ++query) {
    ahead.prefetch_some();
    to_gradients(first, first_key, query);
  }
  // Earlier queries do not attend to a key. The first query that does is in the tile on the diagonal.
  const std::int64_t new_keys = starts_keys ? later : key_tile;
  const auto add_down         = [&](const W* scores, const W* rows, W* sums) {
    const Product<W> product{scores, rooms.score_row, rows, row, block_cols<W>, sums, row};
    const auto steps = [&](std::int64_t key, std::int64_t, std::int64_t) {
      ahead.prefetch_some();
      return Steps{std::max<std::int64_t>(0, key - later), end};
    };
    multiply<Left::columns>(product, keys, padded, steps,
                            [new_keys](W* to, std::int64_t key, std::int64_t, Vector<W> sum) {
                              store_vector(to, key >= new_keys ? sum : load_vector(to) + sum);
                            });
  };
  add_down(rooms.scores, rooms.d_out, rooms.d_values);
  add_down(rooms.d_scores, rooms.queries, rooms.d_keys);
  const bool new_queries = starts_queries && first_key == 0;
  W* const sums          = d_queries.data + first * d_queries.stride;
  const Product<W> product{rooms.d_scores, rooms.score_row, rooms.keys, row, block_cols<W>, sums, d_queries.stride};
  const auto steps = [&](std::int64_t query, std::int64_t in_block, std::int64_t) {
    ahead.prefetch_some();
    return Steps{0, std::min(key_tile, rounded_up(later + query + in_block, last_rows))};
  };
  multiply<Left::rows>(product, end, padded, steps, [new_queries](W* to, std::int64_t, std::int64_t, Vector<W> sum) {
    store_vector(to, new_queries ? sum : load_vector(to) + sum);
  });
}

// What is needed after the tile of queries: the next tile of queries, of this head or of the next one that uses the
// tile of keys. Then, spread over all tiles of queries: the rows of d_qkv that the tile of keys is written to, and the
// next tile of keys. After the last tile of keys, the thread most often continues with the next head.
template <class T>
RowsAhead Head<T>::rows_ahead(std::int64_t first, std::int64_t first_key) const {
  const AttentionShape& shape = attention.shape;
  const std::int64_t size = shape.head_size, group = shape.heads / shape.kv_heads;
  const bool ends_group = (head + 1) % group == 0, ends_keys = first_key + key_tile >= shape.seq;
  const T* const qkv = attention.qkv + sequence * shape.seq * shape.qkv_row();
  RowsAhead ahead;

  std::int64_t next_head = head, next_key = first_key, next_first = first + query_tile;
  if (next_first >= shape.seq) {
    next_head = ends_group && !ends_keys ? head + 1 - group : head + 1;
    if (ends_group) next_key = ends_keys ? 0 : first_key + key_tile;
    next_first = next_key;
  }
  if (next_head < shape.heads) {
    const std::int64_t end    = std::min(next_first + query_tile, shape.seq);
    const std::int64_t before = sequence * shape.seq * shape.out_row();
    ahead.add(head_rows(qkv, shape.qkv_row(), next_head, size), size, next_first, end);
    ahead.add(head_rows(attention.d_out + before, shape.out_row(), next_head, size), size, next_first, end);
    if (next_key == 0)
      ahead.add(head_rows(attention.out + before, shape.out_row(), next_head, size), size, next_first, end);
  }
  const std::int64_t tiles = (shape.seq - first_key + query_tile - 1) / query_tile,
                     share = (key_tile + tiles - 1) / tiles, skipped = (first - first_key) / query_tile * share;
  const auto add_share = [&](auto* data, std::int64_t kv_head, std::int64_t begin) {
    const std::int64_t end = std::min(begin + std::min(key_tile, skipped + share), shape.seq);
    for (const std::int64_t column : {shape.heads + kv_head, shape.heads + shape.kv_heads + kv_head})
      ahead.add(head_rows(data, shape.qkv_row(), column, size), size, begin + skipped, end);
  };
  if (ends_group) {
    const std::int64_t kv_head = head / group;
    add_share(d_qkv, kv_head, first_key);
    if (!ends_keys) {
      add_share(qkv, kv_head, first_key + key_tile);
    } else if (kv_head + 1 < shape.kv_heads) {
      add_share(qkv, kv_head + 1, 0);
    }
  }
  // A call for each query, and one for each block of the products.
  const std::int64_t keys = std::min(key_tile, first - first_key + query_tile), blocks_of_keys = keys / block_cols<W>,
                     blocks_of_head = padded_head<W>(shape) / block_cols<W>;
  ahead.spread_over(query_tile + 2 * query_tile / block_rows * blocks_of_keys +
                    (query_tile + 2 * keys) / block_rows * blocks_of_head);
  return ahead;
}

template <class T>
void Head<T>::set_products(std::int64_t first, std::int64_t count) const {
  const AttentionShape& shape = attention.shape;
  for (std::int64_t r = 0; r < count; ++r) {
    const std::int64_t row                       = sequence * shape.seq + first + r;
    const T* out                                 = attention.out + row * shape.out_row() + head * shape.head_size;
    const W* d_out                               = rooms.d_out + r * tile_row<W>(shape);
    attention.products[row * shape.heads + head] = dot(out, d_out, shape.head_size);
  }
}

// For one query of the tile: turns scores into probabilities after dropout, and d_scores into the gradients of the
// scores. Both are zero for the next keys, which are in the same block of a product. A query beyond the end of the
// sequence attends to none: it has no log_sum, and its probabilities might not be finite.
template <class T>
void Head<T>::to_gradients(std::int64_t first, std::int64_t first_key, std::int64_t query) const {
  constexpr int lanes         = lanes_of<W>;
  const AttentionShape& shape = attention.shape;
  W *const scores = rooms.scores + query * rooms.score_row, *const d_scores = rooms.d_scores + query * rooms.score_row;
  if (first + query >= shape.seq) {
    std::fill_n(scores, rooms.num_keys, W(0));
    std::fill_n(d_scores, rooms.num_keys, W(0));
    return;
  }
  const std::int64_t own = first + query - first_key;  // the last key that the query attends to
  const std::int64_t end = std::min(rooms.num_keys, rounded_up(own + block_rows + last_rows, lanes));
  const std::int64_t at  = (sequence * shape.seq + first + query) * shape.heads + head;
  const W log_sum = attention.log_sums[at], product = attention.products[at];
  const auto to_whole = [&](const auto& with_factor) {
    // First the whole vectors of keys that the query attends to, then those around its last key.
    const auto step = [&](std::int64_t key, const auto& seen_part) {
      const Vector<W> share = cpu::exp2(load_vector(scores + key) - log_sum);
      const Vector<W> slope = share * (with_factor(key, load_vector(d_scores + key)) - product);
      store_vector(scores + key, seen_part(with_factor(key, share)));
      store_vector(d_scores + key, seen_part(slope));
    };
    const std::int64_t whole = std::min(end, (own + 1) / lanes * lanes);
    for (std::int64_t key = 0; key < whole; key += lanes) step(key, [](Vector<W> values) { return values; });
    for (std::int64_t key = whole; key < end; key += lanes) {
      const auto sees = counting_from<W>(0) <= static_cast<LaneInteger<W>>(own - key);
      step(key, [sees](Vector<W> values) { return sees ? values : Vector<W>{}; });
    }
  };
  if (attention.dropout) {
    W factors[key_tile];
    const TileMask mask = tile_mask(*attention.dropout, shape, sequence, head, first + query, first_key);
    mask.apply<W>(1, shape.seq, end, 1, [&factors](std::int64_t, std::int64_t c, W factor) { factors[c] = factor; });
    to_whole([&](std::int64_t key, Vector<W> values) { return values * load_vector(factors + key); });
  } else {
    to_whole([](std::int64_t, Vector<W> values) { return values; });
  }
}

}  // namespace

namespace attention_kernels::STEPGRAPH_LEVEL {

template <class T>
std::int64_t backward_workspace(const AttentionShape& shape) {
  using W                   = Wide<T>;
  const std::int64_t padded = padded_head<W>(shape);
  const std::int64_t panel  = shape.heads / shape.kv_heads * rounded_up(shape.seq, last_rows) * padded;
  return Sizes<W>(shape).all() + (sums_in_place<T>(shape) ? 0 : panel);
}

template <class T>
void backward(const AttentionBackward<T>& attention, const Into<T>& d_qkv, std::int64_t sequence, std::int64_t kv_head,
              Wide<T>* workspace) {
  using W                     = Wide<T>;
  const AttentionShape& shape = attention.shape;
  const std::int64_t size = shape.head_size, padded = padded_head<W>(shape), stride = shape.qkv_row();
  const std::int64_t group = shape.heads / shape.kv_heads, first_head = kv_head * group;
  const std::int64_t key_head = shape.heads + kv_head, value_head = key_head + shape.kv_heads;
  const std::int64_t begin = sequence * shape.seq * stride;  // of the sequence, in qkv
  const Rooms<W> rooms(Sizes<W>(shape), workspace);
  const bool in_place    = sums_in_place<T>(shape);
  const std::int64_t all = rounded_up(shape.seq, last_rows) * padded;  // of one head's panel

  const auto d_queries = [&](std::int64_t i) -> HeadRows<W> {
    if constexpr (std::is_same_v<T, W>) {
      if (in_place) return head_rows(d_qkv.out + begin, stride, first_head + i, size);
    }
    return {rooms.d_queries + i * all, padded};
  };
  const auto put_rows = [&](std::int64_t first, std::int64_t count, std::int64_t head, const HeadRows<W>& rows,
                            W factor) {
    for (std::int64_t r = 0; r < count; ++r) {
      const W* row = rows.data + r * rows.stride;
      put(d_qkv, begin + (first + r) * stride + head * size, size, [=](std::int64_t i) { return row[i] * factor; });
    }
  };
  // In place, sums start with the previous values.
  const bool copies = in_place && d_qkv.base != nullptr && d_qkv.base != d_qkv.out;
  for (std::int64_t r = 0; copies && r < shape.seq; ++r) {
    const std::int64_t at = begin + r * stride + first_head * size;
    std::copy_n(d_qkv.base + at, group * size, d_qkv.out + at);
  }

  const auto keys   = head_rows(attention.qkv + begin, stride, key_head, size),
             values = head_rows(attention.qkv + begin, stride, value_head, size);
  for (std::int64_t first_key = 0; first_key < shape.seq; first_key += key_tile) {
    const auto pack_across = [&](const HeadRows<const T>& rows_of, W factor, W* to) {
      const HeadRows<const W> rows = tile_rows(rows_of, shape, first_key, rooms.num_keys, rooms.keys);
      for (std::int64_t key = 0; key < rooms.num_keys; key += block_cols<W>) {
        transpose<W>({rows.data + key * rows.stride, rows.stride}, block_cols<W>, padded, factor, to + key * padded,
                     block_cols<W>);
      }
    };
    pack_across(keys, binary_scale<W>(shape), rooms.keys_across);
    pack_across(values, W(1), rooms.values_across);
    copy_tile(keys, shape, first_key, rooms.num_keys, static_cast<W>(shape.scale), rooms.keys);
    for (std::int64_t i = 0; i < group; ++i) {
      const Head<T> head{attention,         rooms,        sequence, first_head + i,
                         d_qkv.out + begin, d_queries(i), i == 0,   !in_place || d_qkv.base == nullptr};
      for (std::int64_t first = first_key; first < shape.seq; first += query_tile) head.add(first, first_key);
    }
    const std::int64_t count = std::min(key_tile, shape.seq - first_key);
    put_rows(first_key, count, key_head, {rooms.d_keys, tile_row<W>(shape)}, static_cast<W>(shape.scale));
    put_rows(first_key, count, value_head, {rooms.d_values, tile_row<W>(shape)}, W(1));
  }
  for (std::int64_t i = 0; !in_place && i < group; ++i) put_rows(0, shape.seq, first_head + i, d_queries(i), W(1));
}

template std::int64_t backward_workspace<float>(const AttentionShape&);
template std::int64_t backward_workspace<double>(const AttentionShape&);
template std::int64_t backward_workspace<bf16>(const AttentionShape&);
template std::int64_t backward_workspace<f16>(const AttentionShape&);
template void backward<float>(const AttentionBackward<float>&, const Into<float>&, std::int64_t, std::int64_t, float*);
template void backward<double>(const AttentionBackward<double>&, const Into<double>&, std::int64_t, std::int64_t,
                               double*);
template void backward<bf16>(const AttentionBackward<bf16>&, const Into<bf16>&, std::int64_t, std::int64_t, float*);
template void backward<f16>(const AttentionBackward<f16>&, const Into<f16>&, std::int64_t, std::int64_t, float*);

}  // namespace attention_kernels::STEPGRAPH_LEVEL
}  // namespace stepgraph::cpu
