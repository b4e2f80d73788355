#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>

#include "ops/cpu/attention/attention_levels.hpp"
#include "ops/cpu/level.hpp"
// Compiled for the instructions of the level:
#include "ops/cpu/attention/attention_tiles.hpp"
#include "ops/cpu/elementary.hpp"

namespace stepgraph::cpu {
namespace {

// Every tile of keys is prepared once per tile of queries, so tiles of queries are larger.
constexpr std::int64_t query_tile = 256, key_tile = 64;
static_assert(attention_part % key_tile == 0);

// Number of queries processed together, one per lane, from scores to output. The data of a strip stays in the
// first-level cache, and keys and values pass through it once per strip.
template <class W>
constexpr std::int64_t strip = std::max(16, block_cols<W>);

// Sizes of tiles.
template <class W>
struct Sizes {
  std::int64_t num_queries, num_keys;  // rows of a tile; a short sequence needs fewer
  std::int64_t padded, row;            // columns of a head; the distance between rows of a tile

  explicit Sizes(const AttentionShape& shape)
      : num_queries(std::min(query_tile, rounded_up(shape.seq, strip<W>))),
        num_keys(std::min(key_tile, num_queries)),
        padded(padded_head<W>(shape)),
        row(tile_row<W>(shape)) {}
  // Elements of all rooms.
  [[nodiscard]] std::int64_t all() const {
    return num_queries * padded + (num_queries + 2 * num_keys) * row + num_keys * strip<W> + 3 * num_queries;
  }
};

// Parts of the workspace.
template <class W>
struct Rooms : Sizes<W> {
  W *queries, *out;             // for a tile of queries; queries in strips, each transposed
  W *keys, *values;             // for a tile of keys; keys may be read in place
  W* scores;                    // for a tile of keys and a strip of queries, one key per row
  W *largest, *sums, *shrinks;  // per query

  Rooms(const Sizes<W>& sizes, W* workspace)
      : Sizes<W>(sizes),
        queries(workspace),
        out(queries + sizes.num_queries * sizes.padded),
        keys(out + sizes.num_queries * sizes.row),
        values(keys + sizes.num_keys * sizes.row),
        scores(values + sizes.num_keys * sizes.row),
        largest(scores + sizes.num_keys * strip<W>),
        sums(largest + sizes.num_queries),
        shrinks(sums + sizes.num_queries) {}
};

// A strip of queries of a tile, from `query` on, and the keys of a tile that it attends to.
template <class W>
struct Strip {
  const Rooms<W>& rooms;
  HeadRows<const W> keys;  // of the tile
  std::int64_t query;
  std::int64_t first_seen;  // keys that the first query attends to: its own position and earlier
  bool first_tile;          // of keys
  RowsAhead& ahead;         // prefetched along with products
  [[nodiscard]] std::int64_t seen() const { return std::min(key_tile, first_seen - 1 + strip<W>); }

  void score() const;
  void exponentiate() const;
  void add_values() const;
  void finish() const;
};

// scores = keys queries^T.
template <class W>
void Strip<W>::score() const {
  const Product<W> product{keys.data,    keys.stride, rooms.queries + query * rooms.padded, strip<W>, block_cols<W>,
                           rooms.scores, strip<W>};
  const auto steps = [this](std::int64_t, std::int64_t, std::int64_t) {
    ahead.prefetch_some();
    return Steps{0, rooms.padded};
  };
  multiply<Left::rows>(product, seen(), strip<W>, steps,
                       [](W* to, std::int64_t, std::int64_t, Vector<W> sum) { store_vector(to, sum); });
}

// Turns scores into powers of two, up to a common factor per query, and updates largest, sums and shrinks.
template <class W>
void Strip<W>::exponentiate() const {
  constexpr int lanes = lanes_of<W>, vectors = strip<W> / lanes;
  constexpr W nothing = -std::numeric_limits<W>::infinity();
  // Copies, because the compiler cannot exclude that stores modify the members.
  W* const scores        = rooms.scores;
  const std::int64_t end = seen();
  for (std::int64_t key = first_seen; key < end; ++key) {
    for (int v = 0; v < vectors; ++v) {
      W* at              = scores + key * strip<W> + v * lanes;
      const auto numbers = counting_from<W>(static_cast<LaneInteger<W>>(first_seen + v * lanes));
      store_vector(at, numbers > static_cast<LaneInteger<W>>(key) ? load_vector(at) : Vector<W>{} + nothing);
    }
  }
  Vector<W> before[vectors], most[vectors], of_odd[vectors], sum[vectors];
  for (int v = 0; v < vectors; ++v) {
    before[v] = first_tile ? Vector<W>{} + nothing : load_vector(rooms.largest + query + v * lanes);
    most[v]   = before[v];
    of_odd[v] = before[v];
    sum[v]    = Vector<W>{};
  }
  for (std::int64_t key = 0; key < end; key += 2) {  // two at a time, because comparisons form a dependency chain
    const W* at = scores + key * strip<W>;
    for (int v = 0; v < vectors; ++v) {
      most[v]   = larger(load_vector(at + v * lanes), most[v]);
      of_odd[v] = larger(load_vector(at + strip<W> + v * lanes), of_odd[v]);
    }
  }
  for (int v = 0; v < vectors; ++v) most[v] = larger(of_odd[v], most[v]);
  for (std::int64_t key = 0; key < end; ++key) {
    for (int v = 0; v < vectors; ++v) {
      W* at                 = scores + key * strip<W> + v * lanes;
      const Vector<W> power = cpu::exp2(load_vector(at) - most[v]);
      sum[v] += power;
      store_vector(at, power);
    }
  }
  for (int v = 0; v < vectors; ++v) {
    const std::int64_t at = query + v * lanes;
    if (!first_tile) {
      const Vector<W> shrink = cpu::exp2(before[v] - most[v]);
      sum[v] += load_vector(rooms.sums + at) * shrink;
      store_vector(rooms.shrinks + at, shrink);
    }
    store_vector(rooms.largest + at, most[v]);
    store_vector(rooms.sums + at, sum[v]);
  }
}

// out = out * shrinks + scores^T values.
template <class W>
void Strip<W>::add_values() const {
  const Product<W> product{
      rooms.scores, strip<W>, rooms.values, rooms.row, block_cols<W>, rooms.out + query * rooms.row, rooms.row};
  const auto steps = [this](std::int64_t first, std::int64_t queries, std::int64_t) {
    ahead.prefetch_some();
    return Steps{0, std::min(key_tile, first_seen - 1 + first + queries)};
  };
  if (first_tile) {
    multiply<Left::columns>(product, strip<W>, rooms.padded, steps,
                            [](W* to, std::int64_t, std::int64_t, Vector<W> sum) { store_vector(to, sum); });
  } else {
    const W* shrinks = rooms.shrinks + query;
    multiply<Left::columns>(product, strip<W>, rooms.padded, steps,
                            [shrinks](W* to, std::int64_t r, std::int64_t, Vector<W> sum) {
                              store_vector(to, load_vector(to) * shrinks[r] + sum);
                            });
  }
}

// After the last tile of keys: turns largest into the log_sums, and shrinks into the factors of the outputs.
template <class W>
void Strip<W>::finish() const {
  for (std::int64_t at = query; at < query + strip<W>; at += lanes_of<W>) {
    const Vector<W> sums = load_vector(rooms.sums + at);
    store_vector(rooms.largest + at, load_vector(rooms.largest + at) + cpu::log2(sums));
    store_vector(rooms.shrinks + at, W(1) / sums);
  }
}

// One sequence and one query head.
template <class T>
struct Head {
  using W = Wide<T>;
  const AttentionForward<T>& attention;
  const Rooms<W>& rooms;
  std::int64_t sequence, head;

  // Computes `count` queries from `first` on, at most a tile.
  void attend(std::int64_t first, std::int64_t count) const;

 private:
  [[nodiscard]] HeadRows<const T> queries(std::int64_t of_head) const;
  [[nodiscard]] HeadRows<const T> keys(std::int64_t of_head) const;
  [[nodiscard]] HeadRows<const T> values(std::int64_t of_head) const;
  [[nodiscard]] HeadRows<T> out() const;
  [[nodiscard]] HeadRows<const W> key_rows(std::int64_t key) const;
  [[nodiscard]] RowsAhead rows_ahead(std::int64_t first, std::int64_t count, std::int64_t key) const;
  void put(const Strip<W>& strip_of, std::int64_t first, std::int64_t count) const;
};

template <class T>
HeadRows<const T> Head<T>::queries(std::int64_t of_head) const {
  const AttentionShape& shape = attention.shape;
  return head_rows(attention.qkv + sequence * shape.seq * shape.qkv_row(), shape.qkv_row(), of_head, shape.head_size);
}
template <class T>
HeadRows<const T> Head<T>::keys(std::int64_t of_head) const {
  const AttentionShape& shape = attention.shape;
  return queries(shape.heads + of_head * shape.kv_heads / shape.heads);
}
template <class T>
HeadRows<const T> Head<T>::values(std::int64_t of_head) const {
  const AttentionShape& shape = attention.shape;
  return queries(shape.heads + shape.kv_heads + of_head * shape.kv_heads / shape.heads);
}
template <class T>
HeadRows<T> Head<T>::out() const {
  const AttentionShape& shape = attention.shape;
  return head_rows(attention.out + sequence * shape.seq * shape.out_row(), shape.out_row(), head, shape.head_size);
}

template <class T>
void Head<T>::attend(std::int64_t first, std::int64_t count) const {
  const AttentionShape& shape = attention.shape;
  const auto tile_of_queries  = tile_rows(queries(head), shape, first, rounded_up(count, strip<W>), rooms.out);
  for (std::int64_t query = 0; query < count; query += strip<W>) {
    transpose<W>({tile_of_queries.data + query * tile_of_queries.stride, tile_of_queries.stride}, strip<W>,
                 rooms.padded, binary_scale<W>(shape), rooms.queries + query * rooms.padded, strip<W>);
  }
  for (std::int64_t key = 0; key < first + count; key += key_tile) {
    const auto tile_of_keys = key_rows(key);
    copy_tile(values(head), shape, key, rooms.num_keys, W(1), rooms.values);
    RowsAhead ahead = rows_ahead(first, count, key);
    for (std::int64_t query = std::max<std::int64_t>(0, key - first); query < count; query += strip<W>) {
      const Strip<W> with{rooms, tile_of_keys, query, first + query - key + 1, key == 0, ahead};
      with.score();
      with.exponentiate();
      if (attention.dropout) {
        const TileMask mask = tile_mask(*attention.dropout, shape, sequence, head, first + query, key);
        mask.apply<W>(with.seen(), 1, strip<W>, shape.seq,
                      [this](std::int64_t r, std::int64_t c, W factor) { rooms.scores[r * strip<W> + c] *= factor; });
      }
      with.add_values();
      const std::int64_t left = std::min(strip<W>, count - query);
      if (first + query + left <= key + key_tile) put(with, first, left);
    }
  }
}

// The tile of keys that starts at `key`. With AVX-512 it is read in place where that is possible (tile_rows): a copy
// costs more than it saves.
template <class T>
HeadRows<const Wide<T>> Head<T>::key_rows(std::int64_t key) const {
  if constexpr (vector_bytes == 64) return tile_rows(keys(head), attention.shape, key, rooms.num_keys, rooms.keys);
  copy_tile(keys(head), attention.shape, key, rooms.num_keys, W(1), rooms.keys);
  return {rooms.keys, rooms.row};
}

// What is needed after a tile of keys, and the outputs of queries for which it is the last one. The thread most often
// continues with the next head.
template <class T>
RowsAhead Head<T>::rows_ahead(std::int64_t first, std::int64_t count, std::int64_t key) const {
  const AttentionShape& shape = attention.shape;
  const std::int64_t size = shape.head_size, end = first + count, first_query = std::max(first, key);
  const std::int64_t next_head = end < shape.seq ? head : head + 1, next_first = end < shape.seq ? end : 0;
  RowsAhead ahead;
  const auto add_keys = [&](std::int64_t of_head, std::int64_t begin) {
    const std::int64_t last = std::min(begin + key_tile, shape.seq);
    ahead.add(keys(of_head), size, begin, last);
    ahead.add(values(of_head), size, begin, last);
  };
  ahead.add(out(), size, first_query, std::min(key + key_tile, end));
  if (key + key_tile < end) {
    add_keys(head, key + key_tile);
  } else if (next_head < shape.heads) {
    add_keys(next_head, 0);
  }
  if (key == 0 && next_head < shape.heads) {
    ahead.add(queries(next_head), size, next_first, std::min(next_first + query_tile, shape.seq));
  }
  const std::int64_t blocks = key_tile / block_rows + strip<W> / block_rows * (rooms.padded / block_cols<W>);
  ahead.spread_over(rounded_up(end - first_query, strip<W>) / strip<W> * blocks);
  return ahead;
}

// Writes the results of the first `count` queries of a strip. `first` is the first query of the tile.
template <class T>
void Head<T>::put(const Strip<W>& strip_of, std::int64_t first, std::int64_t count) const {
  const AttentionShape& shape = attention.shape;
  const HeadRows<T> to_rows   = out();
  strip_of.finish();
  for (std::int64_t r = strip_of.query; r < strip_of.query + count; ++r) {
    const W* from = rooms.out + r * rooms.row;
    T* to         = to_rows.data + (first + r) * to_rows.stride;
    const W share = rooms.shrinks[r];
    for (std::int64_t i = 0; i < shape.head_size; ++i) to[i] = narrow<T>(from[i] * share);
    attention.log_sums[(sequence * shape.seq + first + r) * shape.heads + head] = rooms.largest[r];
  }
}

}  // namespace

namespace attention_kernels::STEPGRAPH_LEVEL {

template <class T>
std::int64_t forward_workspace(const AttentionShape& shape) {
  return Sizes<Wide<T>>(shape).all();
}

template <class T>
void forward(const AttentionForward<T>& attention, const HeadPart& part, Wide<T>* workspace) {
  const Rooms<Wide<T>> rooms(Sizes<Wide<T>>(attention.shape), workspace);
  const Head<T> head{attention, rooms, part.sequence, part.head};
  for (std::int64_t first = part.first; first < part.end; first += query_tile) {
    head.attend(first, std::min(query_tile, part.end - first));
  }
}

template std::int64_t forward_workspace<float>(const AttentionShape&);
template std::int64_t forward_workspace<double>(const AttentionShape&);
template std::int64_t forward_workspace<bf16>(const AttentionShape&);
template std::int64_t forward_workspace<f16>(const AttentionShape&);
template void forward<float>(const AttentionForward<float>&, const HeadPart&, float*);
template void forward<double>(const AttentionForward<double>&, const HeadPart&, double*);
template void forward<bf16>(const AttentionForward<bf16>&, const HeadPart&, float*);
template void forward<f16>(const AttentionForward<f16>&, const HeadPart&, float*);

}  // namespace attention_kernels::STEPGRAPH_LEVEL
}  // namespace stepgraph::cpu
