#include "ops/cpu/attention.hpp"

#include <cmath>
#include <limits>

#include "ops/cpu/attention_tiles.hpp"
#include "ops/cpu/elementary.hpp"

namespace stepgraph::cpu {
namespace {

// Parts of the workspace.
template <class W>
struct Rooms {
  W *queries, *keys, *values, *out, *scores;  // queries transposed; scores of a key in a row
  W *largest, *sums, *shrinks;                // of each query

  Rooms(const AttentionShape& shape, W* workspace) {
    const std::int64_t size = tile_size * padded_head<W>(shape);
    queries                 = workspace;
    keys                    = queries + size;
    values                  = keys + size;
    out                     = values + size;
    scores                  = out + size;
    largest                 = scores + tile_size * tile_size;
    sums                    = largest + tile_size;
    shrinks                 = sums + tile_size;
  }
};

// Keys of a tile that are needed for the queries before `end`: on the diagonal, whole blocks up to the last of them.
std::int64_t keys_seen(bool diagonal, std::int64_t end) {
  return diagonal ? std::min(tile_size, rounded_up(end, block_rows)) : tile_size;
}

// Scores become powers of two, up to a common factor of each query; largest, sums and shrinks follow. A block of
// queries at a time, each a lane.
template <class W>
void exponentiate(const Rooms<W>& rooms, bool diagonal, bool first_tile) {
  constexpr int lanes = lanes_of<W>, cols = block_cols<W>;
  constexpr W nothing = -std::numeric_limits<W>::infinity();
  for (std::int64_t query = 0; query < tile_size; query += cols) {
    const std::int64_t seen = keys_seen(diagonal, query + cols);
    W* scores               = rooms.scores + query;
    if (diagonal) {
      for (std::int64_t key = query; key < seen; ++key) {
        for (int v = 0; v < block_vectors; ++v) {
          W* at              = scores + key * tile_size + v * lanes;
          const auto numbers = counting_from<W>(static_cast<LaneInteger<W>>(query + v * lanes));
          const auto sees    = numbers >= static_cast<LaneInteger<W>>(key);
          store_vector(at, sees ? load_vector(at) : Vector<W>{} + nothing);
        }
      }
    }
    Vector<W> before[block_vectors], most[block_vectors], sum[block_vectors];
    for (int v = 0; v < block_vectors; ++v) {
      before[v] = first_tile ? Vector<W>{} + nothing : load_vector(rooms.largest + query + v * lanes);
      most[v]   = before[v];
      sum[v]    = Vector<W>{};
    }
    for (std::int64_t key = 0; key < seen; ++key) {
      for (int v = 0; v < block_vectors; ++v)
        most[v] = larger(load_vector(scores + key * tile_size + v * lanes), most[v]);
    }
    for (std::int64_t key = 0; key < seen; ++key) {
      for (int v = 0; v < block_vectors; ++v) {
        W* at                 = scores + key * tile_size + v * lanes;
        const Vector<W> power = cpu::exp2(load_vector(at) - most[v]);
        sum[v] += power;
        store_vector(at, power);
      }
    }
    for (int v = 0; v < block_vectors; ++v) {
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
}

// scores = keys queries^T.
template <class W>
void score(const HeadRows<const W>& keys, const Rooms<W>& rooms, std::int64_t padded, bool diagonal) {
  for (std::int64_t key = 0; key < tile_size; key += block_rows) {
    const std::int64_t from = diagonal ? key / block_cols<W> * block_cols<W> : 0;  // queries before see none of these
    multiply_rows<W>({.depth = padded,
                      .a     = keys.data + key * keys.stride,
                      .a_row = keys.stride,
                      .b     = rooms.queries + from,
                      .b_row = tile_size,
                      .c     = rooms.scores + key * tile_size + from,
                      .c_row = tile_size},
                     tile_size - from, [](W* to, int, Vector<W> sum) { store_vector(to, sum); });
  }
}

// out = out * shrinks + scores^T values.
template <class W>
void add_values(const Rooms<W>& rooms, std::int64_t padded, bool diagonal, bool first_tile) {
  for (std::int64_t query = 0; query < tile_size; query += block_rows) {
    const Product<W> product{.depth = keys_seen(diagonal, query + block_rows),
                             .a     = rooms.scores + query,
                             .a_row = tile_size,
                             .b     = rooms.values,
                             .b_row = padded,
                             .c     = rooms.out + query * padded,
                             .c_row = padded};
    if (first_tile) {
      multiply_transposed(product, padded, [](W* to, int, Vector<W> sum) { store_vector(to, sum); });
    } else {
      const W* shrinks = rooms.shrinks + query;
      multiply_transposed(product, padded, [shrinks](W* to, int row, Vector<W> sum) {
        store_vector(to, load_vector(to) * shrinks[row] + sum);
      });
    }
  }
}

}  // namespace

template <class T>
std::int64_t attention_forward_workspace(const AttentionShape& shape) {
  return tile_size * (4 * padded_head<Wide<T>>(shape) + tile_size + 3);
}

template <class T>
void attention_forward(const AttentionForward<T>& attention, std::int64_t sequence, std::int64_t head,
                       Wide<T>* workspace) {
  using W                     = Wide<T>;
  const AttentionShape& shape = attention.shape;
  const std::int64_t size = shape.head_size, padded = padded_head<W>(shape), row = sequence * shape.seq;
  const std::int64_t kv_head = head * shape.kv_heads / shape.heads;
  const T* rows              = attention.qkv + row * shape.qkv_row();
  const auto queries         = head_rows(rows, shape.qkv_row(), head, size),
             keys            = head_rows(rows, shape.qkv_row(), shape.heads + kv_head, size),
             values          = head_rows(rows, shape.qkv_row(), shape.heads + shape.kv_heads + kv_head, size);
  const Rooms<W> rooms(shape, workspace);
  for (std::int64_t first = 0; first < shape.seq; first += tile_size) {
    transpose_tile(tile_rows(queries, shape, first, rooms.out), shape, binary_scale<W>(shape), rooms.queries);
    for (std::int64_t key = 0; key <= first; key += tile_size) {
      const bool diagonal = key == first, first_tile = key == 0;
      score(tile_rows(keys, shape, key, rooms.keys), rooms, padded, diagonal);
      exponentiate(rooms, diagonal, first_tile);
      if (attention.dropout) {
        const TileMask mask = tile_mask(*attention.dropout, shape, sequence, head, first, key);
        mask.apply<W>(
            tile_size, 1, tile_size, shape.seq,
            [scores = rooms.scores](std::int64_t r, std::int64_t c, W factor) { scores[r * tile_size + c] *= factor; });
      }
      copy_tile(values, shape, key, W(1), rooms.values);
      add_values(rooms, padded, diagonal, first_tile);
    }
    const std::int64_t count = std::min(tile_size, shape.seq - first);
    for (std::int64_t r = 0; r < count; ++r) {
      const W* from = rooms.out + r * padded;
      T* to         = attention.out + (row + first + r) * shape.out_row() + head * size;
      const W share = W(1) / rooms.sums[r];
      for (std::int64_t i = 0; i < size; ++i) to[i] = narrow<T>(from[i] * share);
      attention.log_sums[(row + first + r) * shape.heads + head] = rooms.largest[r] + std::log2(rooms.sums[r]);
    }
  }
}

template std::int64_t attention_forward_workspace<float>(const AttentionShape&);
template std::int64_t attention_forward_workspace<double>(const AttentionShape&);
template std::int64_t attention_forward_workspace<bf16>(const AttentionShape&);
template void attention_forward<float>(const AttentionForward<float>&, std::int64_t, std::int64_t, float*);
template void attention_forward<double>(const AttentionForward<double>&, std::int64_t, std::int64_t, double*);
template void attention_forward<bf16>(const AttentionForward<bf16>&, std::int64_t, std::int64_t, float*);

}  // namespace stepgraph::cpu
