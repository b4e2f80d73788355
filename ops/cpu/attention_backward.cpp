#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "engine/run/context.hpp"
#include "ops/cpu/attention_levels.hpp"
#include "ops/cpu/level.hpp"
// Compiled for the instructions of the level:
#include "ops/cpu/attention_tiles.hpp"
#include "ops/cpu/elementary.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"

// With P the probabilities and Z the dropout factors: dV = (P Z)^T dO; dP = (dO V^T) Z; dS = P (dP - rowsum(dO O)); dQ
// = scale dS K; dK = scale dS^T Q (FlashAttention-2, section 2.3.2). The outer loop is over tiles of keys, the inner
// one over tiles of queries.
namespace stepgraph::cpu {
namespace {

constexpr std::int64_t query_tile = 64, key_tile = 64;

// Parts of the workspace.
template <class W>
struct Rooms {
  W *keys, *keys_across, *values_across, *d_keys, *d_values;  // for a tile of keys; `across`: transposed
  W *queries, *d_out;                                         // for a tile of queries
  W *scores, *d_scores;                                       // for both: one query per row
  W* block;                                                   // a block of queries of one of these, transposed
  W* d_queries;                                               // a panel of the whole sequence, if needed

  Rooms(const AttentionShape& shape, W* workspace) {
    const std::int64_t padded = padded_head<W>(shape), size = key_tile * padded;
    keys          = workspace;
    keys_across   = keys + size;
    values_across = keys_across + size;
    d_keys        = values_across + size;
    d_values      = d_keys + size;
    queries       = d_values + size;
    d_out         = queries + query_tile * padded;
    scores        = d_out + query_tile * padded;
    d_scores      = scores + query_tile * key_tile;
    block         = d_scores + query_tile * key_tile;
    d_queries     = block + std::max(key_tile, padded) * block_rows;
  }
};

// Whether gradients of queries are summed in place. Their blocks must be whole.
template <class T>
bool sums_in_place(const AttentionShape& shape) {
  return std::is_same_v<T, Wide<T>> && shape.head_size == padded_head<Wide<T>>(shape) && shape.seq % block_rows == 0;
}

// One sequence and one query head.
template <class T>
struct Head {
  using W = Wide<T>;
  const AttentionBackward<T>& attention;
  Rooms<W> rooms;
  std::int64_t sequence, head;
  HeadRows<W> d_queries;

  // Adds the contributions of one tile of queries and one tile of keys to each other's gradients.
  void add(std::int64_t first, std::int64_t first_key) const;

 private:
  void set_products(std::int64_t first, std::int64_t count) const;
  void to_gradients(std::int64_t first, std::int64_t first_key, std::int64_t query, std::int64_t seen) const;
};

template <class W>
void store(W* to, int, Vector<W> sum) {
  store_vector(to, sum);
}
template <class W>
void add_to(W* to, int, Vector<W> sum) {
  store_vector(to, load_vector(to) + sum);
}

template <class T>
void Head<T>::add(std::int64_t first, std::int64_t first_key) const {
  const AttentionShape& shape = attention.shape;
  const std::int64_t size = shape.head_size, padded = padded_head<W>(shape), row = sequence * shape.seq;
  const std::int64_t count = std::min(query_tile, shape.seq - first), end = rounded_up(count, block_rows);
  const auto queries = head_rows(attention.qkv + row * shape.qkv_row(), shape.qkv_row(), head, size);
  const auto d_out   = head_rows(attention.d_out + row * shape.out_row(), shape.out_row(), head, size);
  const auto out     = head_rows(attention.out + row * shape.out_row(), shape.out_row(), head, size);
  if (first_key == 0) {
    for (const auto& rows_of : {queries, d_out, out}) prefetch_tile(rows_of, shape, first + query_tile, query_tile);
    prefetch_tile(d_queries, shape, first + query_tile, query_tile);
  }
  copy_tile(queries, shape, first, query_tile, W(1), rooms.queries);
  copy_tile(d_out, shape, first, query_tile, W(1), rooms.d_out);
  if (first_key == 0) set_products(first, count);
  for (std::int64_t query = 0; query < end; query += block_rows) {
    const std::int64_t last = first + query + block_rows - first_key;  // keys that the block's last query attends to
    const std::int64_t seen = std::min(key_tile, rounded_up(last, block_cols<W>));
    const auto across       = [&](const W* rows, W* rows_across, const W* columns, W* scores) {
      transpose<W>({rows + query * padded, padded}, block_rows, padded, W(1), rows_across, block_rows);
      multiply_block<W>({.depth = padded,
                               .a     = rows_across,
                               .a_row = block_rows,
                               .b     = columns,
                               .b_row = key_tile,
                               .c     = scores + query * key_tile,
                               .c_row = key_tile},
                        seen, store<W>);
    };
    across(rooms.queries, rooms.block, rooms.keys_across, rooms.scores);
    across(rooms.d_out, rooms.block, rooms.values_across, rooms.d_scores);
    to_gradients(first, first_key, query, seen);
    transpose<W>({rooms.d_scores + query * key_tile, key_tile}, block_rows, seen, W(1), rooms.block, block_rows);
    multiply_block<W>({.depth = std::min(key_tile, last),
                       .a     = rooms.block,
                       .a_row = block_rows,
                       .b     = rooms.keys,
                       .b_row = padded,
                       .c     = d_queries.data + (first + query) * d_queries.stride,
                       .c_row = d_queries.stride},
                      padded, add_to<W>);
  }
  // One after the other: both together need more than a first-level cache.
  const auto add_down = [&](const W* scores, const W* rows, W* sums) {
    for (std::int64_t key = 0; key < std::min(key_tile, first + end - first_key); key += block_rows) {
      const std::int64_t from = std::max<std::int64_t>(0, first_key + key - first);  // earlier queries do not attend
      multiply_block<W>({.depth = end - from,
                         .a     = scores + from * key_tile + key,
                         .a_row = key_tile,
                         .b     = rows + from * padded,
                         .b_row = padded,
                         .c     = sums + key * padded,
                         .c_row = padded},
                        padded, add_to<W>);
    }
  };
  add_down(rooms.scores, rooms.d_out, rooms.d_values);
  add_down(rooms.d_scores, rooms.queries, rooms.d_keys);
}

template <class T>
void Head<T>::set_products(std::int64_t first, std::int64_t count) const {
  const AttentionShape& shape = attention.shape;
  for (std::int64_t r = 0; r < count; ++r) {
    const std::int64_t row = sequence * shape.seq + first + r;
    const T* out           = attention.out + row * shape.out_row() + head * shape.head_size;
    const W* d_out         = rooms.d_out + r * padded_head<W>(shape);
    attention.products[row * shape.heads + head] =
        lane_sum<W>(shape.head_size, [=](std::int64_t i) { return wide(out[i]) * d_out[i]; });
  }
}

// For the block of queries from `query` of the tile on: turns scores into probabilities after dropout, and d_scores
// into the gradients of the scores. Queries beyond the end of the sequence are masked: they have no log_sum, and their
// probabilities might not be finite.
template <class T>
void Head<T>::to_gradients(std::int64_t first, std::int64_t first_key, std::int64_t query, std::int64_t seen) const {
  constexpr int lanes         = lanes_of<W>;
  const AttentionShape& shape = attention.shape;
  const bool drops            = attention.dropout.has_value();
  W factors[block_rows * key_tile];
  if (drops) {
    const TileMask mask = tile_mask(*attention.dropout, shape, sequence, head, first + query, first_key);
    mask.apply<W>(block_rows, shape.seq, seen, 1,
                  [&factors](std::int64_t r, std::int64_t c, W factor) { factors[r * key_tile + c] = factor; });
  }
  for (std::int64_t r = 0; r < block_rows; ++r) {
    W *scores = rooms.scores + (query + r) * key_tile, *d_scores = rooms.d_scores + (query + r) * key_tile;
    if (first + query + r >= shape.seq) {
      std::fill_n(scores, seen, W(0));
      std::fill_n(d_scores, seen, W(0));
      continue;
    }
    const std::int64_t at = (sequence * shape.seq + first + query + r) * shape.heads + head;
    const W log_sum = attention.log_sums[at], product = attention.products[at];
    const auto step = [&](std::int64_t key, const auto& seen_part) {
      const Vector<W> share = seen_part(cpu::exp2(load_vector(scores + key) - log_sum));
      if (drops) {
        const Vector<W> factor = load_vector(factors + r * key_tile + key);
        store_vector(scores + key, share * factor);
        store_vector(d_scores + key, share * (load_vector(d_scores + key) * factor - product));
      } else {
        store_vector(scores + key, share);
        store_vector(d_scores + key, share * (load_vector(d_scores + key) - product));
      }
    };
    // First the whole vectors of keys that the query attends to, then those around its last key.
    const std::int64_t own = first + query + r - first_key, whole = std::min(seen, (own + 1) / lanes * lanes);
    for (std::int64_t key = 0; key < whole; key += lanes) step(key, [](Vector<W> share) { return share; });
    for (std::int64_t key = whole; key < seen; key += lanes) {
      const auto sees = counting_from<W>(static_cast<LaneInteger<W>>(key)) <= static_cast<LaneInteger<W>>(own);
      step(key, [sees](Vector<W> share) { return sees ? share : Vector<W>{}; });
    }
  }
}

}  // namespace

namespace attention_kernels::STEPGRAPH_LEVEL {

template <class T>
std::int64_t backward_workspace(const AttentionShape& shape) {
  using W                   = Wide<T>;
  const std::int64_t padded = padded_head<W>(shape);
  const std::int64_t panel  = shape.heads / shape.kv_heads * rounded_up(shape.seq, block_rows) * padded;
  return (5 * key_tile + 2 * query_tile) * padded + 2 * query_tile * key_tile +
         std::max(key_tile, padded) * block_rows + (sums_in_place<T>(shape) ? 0 : panel);
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
  const Rooms<W> rooms(shape, workspace);
  const bool in_place    = sums_in_place<T>(shape);
  const std::int64_t all = rounded_up(shape.seq, block_rows) * padded;  // of one head's panel

  const auto d_queries = [&](std::int64_t i) -> HeadRows<W> {
    if constexpr (std::is_same_v<T, W>) {
      if (in_place) return head_rows(d_qkv.out + begin, stride, first_head + i, size);
    }
    return {rooms.d_queries + i * all, padded};
  };
  const auto put_rows = [&](std::int64_t first, std::int64_t count, std::int64_t head, const W* rows, W factor) {
    for (std::int64_t r = 0; r < count; ++r) {
      const W* row = rows + r * padded;
      put(d_qkv, begin + (first + r) * stride + head * size, size, [=](std::int64_t i) { return row[i] * factor; });
    }
  };
  if (in_place) {  // sums start with the previous values
    for (std::int64_t r = 0; d_qkv.base != d_qkv.out && r < shape.seq; ++r) {
      const std::int64_t at = begin + r * stride + first_head * size, count = group * size;
      if (d_qkv.base == nullptr) {
        std::fill_n(d_qkv.out + at, count, T(W(0)));
      } else {
        std::copy_n(d_qkv.base + at, count, d_qkv.out + at);
      }
    }
  } else {
    std::fill_n(rooms.d_queries, group * all, W(0));
  }

  const auto keys   = head_rows(attention.qkv + begin, stride, key_head, size),
             values = head_rows(attention.qkv + begin, stride, value_head, size);
  for (std::int64_t first_key = 0; first_key < shape.seq; first_key += key_tile) {
    transpose(tile_rows(keys, shape, first_key, key_tile, rooms.keys), key_tile, padded, binary_scale<W>(shape),
              rooms.keys_across, key_tile);
    transpose(tile_rows(values, shape, first_key, key_tile, rooms.keys), key_tile, padded, W(1), rooms.values_across,
              key_tile);
    copy_tile(keys, shape, first_key, key_tile, static_cast<W>(shape.scale), rooms.keys);
    for (const auto& rows_of : {keys, values}) prefetch_tile(rows_of, shape, first_key + key_tile, key_tile);
    std::fill_n(rooms.d_keys, 2 * key_tile * padded, W(0));  // d_keys and d_values
    for (std::int64_t i = 0; i < group; ++i) {
      const Head<T> head{attention, rooms, sequence, first_head + i, d_queries(i)};
      for (std::int64_t first = first_key; first < shape.seq; first += query_tile) head.add(first, first_key);
    }
    const std::int64_t count = std::min(key_tile, shape.seq - first_key);
    put_rows(first_key, count, key_head, rooms.d_keys, static_cast<W>(shape.scale));
    put_rows(first_key, count, value_head, rooms.d_values, W(1));
  }
  for (std::int64_t i = 0; !in_place && i < group; ++i) {
    put_rows(0, shape.seq, first_head + i, rooms.d_queries + i * all, W(1));
  }
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
