#include "ops/cpu/attention/attention_bf16.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "engine/run/context.hpp"
#include "ops/cpu/gemm/gemm_watch.hpp"
#if defined(__x86_64__)
#define STEPGRAPH_AVX512  // which all processors with these products have
#endif
#include "ops/cpu/level.hpp"
// Compiled for the instructions of the level:
#include "ops/cpu/attention/attention_tiles.hpp"
#include "ops/cpu/bf16_lanes.hpp"
#include "ops/cpu/elementary.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"

// As in ops/cpu/attention/attention_forward.cpp and ops/cpu/attention/attention_backward.cpp, but a row of a tile is a
// query, and products read queries, keys and values where they are.
namespace stepgraph::cpu {
namespace {

constexpr int lanes = lanes_of<float>;
using Floats        = Vector<float>;

// The tile on the diagonal is cut by queries, because the first ones do not attend to its last keys.
constexpr std::int64_t diagonal_queries = 64;
// Queries and keys in a tile: whole vectors of every processor.
std::int64_t tile_of(const AttentionShape& shape) { return std::min(attention_part, rounded_up(shape.seq, 16)); }

inline void store_rounded(bf16* to, Floats values) { Bf16Lanes<lanes>::set(to, values); }

// The lanes of the vector from `first` on that are below `end`.
inline auto below(std::int64_t first, std::int64_t end) {
  return counting_from<float>(static_cast<std::int32_t>(first)) < static_cast<std::int32_t>(end);
}

// One sequence and one head of it, as matrices with a row for each position.
struct Rows {
  const bf16* data;
  std::int64_t stride;
  [[nodiscard]] Matrix<bf16> from(std::int64_t row) const { return {data + row * stride, stride, 1}; }
};

// Products of tiles, of m rows and n columns.
struct Products {
  Bf16Multiply multiply;
  Bf16Room& room;
  void set(const Matrix<bf16>& a, const Matrix<bf16>& b, std::int64_t m, std::int64_t n, std::int64_t k, float* c,
           std::int64_t stride) const {
    watch_operands(a, b, m, n, k);
    multiply(room, {.m = m, .n = n, .k = k, .a = a, .b = b, .c = c, .c_stride = stride}, {});
  }
  void add(const Matrix<bf16>& a, const Matrix<bf16>& b, std::int64_t m, std::int64_t n, std::int64_t k, float* c,
           std::int64_t stride) const {
    watch_operands(a, b, m, n, k);
    multiply(room, {.m = m, .n = n, .k = k, .a = a, .b = b, .c = c, .base = c, .c_stride = stride}, {});
  }

 private:
  // The product is compiled without ThreadSanitizer. Its results are in workspaces of the thread.
  static void watch_operands(const Matrix<bf16>& a, const Matrix<bf16>& b, std::int64_t m, std::int64_t n,
                             std::int64_t k) {
    if constexpr (watches) {
      watch_matrix(a, m, k);
      watch_matrix(b, k, n);
    }
  }
};

// The factor of probabilities that are kept. It multiplies results, not the rounded probabilities: the largest ones are
// 1 in the forward pass and exact in bf16, and the factor is not.
float factor_of_kept(const std::optional<AttentionDropout>& dropout) {
  return dropout ? static_cast<float>(dropout->mask.scale) : 1.0F;
}

float largest_lane(Floats values) {
  float most = values[0];
  for (int lane = 1; lane < lanes; ++lane) most = std::max(most, values[lane]);
  return most;
}

// --- forward ---------------------------------------------------------------------------------------------------------

struct ForwardRooms {
  float *scores, *out, *largest, *sums;
  bf16* shares;
  ForwardRooms(const AttentionShape& shape, float* workspace) {
    const std::int64_t tile = tile_of(shape);
    scores                  = workspace;
    out                     = scores + tile * tile;
    largest                 = out + tile * shape.head_size;
    sums                    = largest + tile;
    shares                  = reinterpret_cast<bf16*>(sums + tile);
  }
};

// Turns a row of scores into powers of two up to a common factor, and updates the largest score and the sum of the
// query. The first `seen` of `keys` are attended to; the others become zero. Returns the factor of earlier keys.
float exponentiate(float* scores, std::int64_t seen, std::int64_t keys, float scale, float& largest, float& sum) {
  constexpr float nothing  = -std::numeric_limits<float>::infinity();
  const std::int64_t whole = seen / lanes * lanes;
  Floats most              = Floats{} + nothing;
  for (std::int64_t key = 0; key < whole; key += lanes) most = larger(load_vector(scores + key), most);
  if (whole < seen) most = larger(below(whole, seen) ? load_vector(scores + whole) : Floats{} + nothing, most);
  const float before = largest;
  largest            = std::max(before, largest_lane(most) * scale);
  Floats total       = {};
  for (std::int64_t key = 0; key < whole; key += lanes) {
    const Floats power = cpu::exp2(load_vector(scores + key) * scale - largest);
    total += power;
    store_vector(scores + key, power);
  }
  for (std::int64_t key = whole; key < keys; key += lanes) {
    const Floats power = below(key, seen) ? cpu::exp2(load_vector(scores + key) * scale - largest) : Floats{};
    total += power;
    store_vector(scores + key, power);
  }
  float added = 0;
  for (int lane = 0; lane < lanes; ++lane) added += total[lane];
  const float shrink = cpu::exp2(Floats{} + (before - largest))[0];
  sum                = sum * shrink + added;
  return shrink;
}

void round_row(const float* from, std::int64_t count, bf16* to) {
  for (std::int64_t i = 0; i < count; i += lanes) store_rounded(to + i, load_vector(from + i));
}

// --- backward --------------------------------------------------------------------------------------------------------

struct BackwardRooms {
  float *scores, *d_scores, *factors, *d_keys, *d_values, *d_queries;
  bf16 *shares, *gradients;  // probabilities that are kept; gradients of scores
  BackwardRooms(const AttentionShape& shape, float* workspace) {
    const std::int64_t tile = tile_of(shape);
    scores                  = workspace;
    d_scores                = scores + tile * tile;
    factors                 = d_scores + tile * tile;
    d_keys                  = factors + tile * tile;
    d_values                = d_keys + tile * shape.head_size;
    shares                  = reinterpret_cast<bf16*>(d_values + tile * shape.head_size);
    gradients               = shares + tile * tile;
    d_queries               = reinterpret_cast<float*>(gradients + tile * tile);
  }
};

// A row of scores and the products of d_out and values: probabilities that are kept, and the gradients of scores.
void to_gradients(const float* scores, const float* d_scores, const float* factors, std::int64_t seen,
                  std::int64_t keys, float scale, float log_sum, float product, bf16* shares, bf16* gradients) {
  const auto step = [&](std::int64_t key, const auto& seen_part) {
    const Floats share  = seen_part(cpu::exp2(load_vector(scores + key) * scale - log_sum));
    const Floats factor = factors == nullptr ? Floats{} + 1.0F : load_vector(factors + key);
    store_rounded(shares + key, factor == Floats{} ? Floats{} : share);
    store_rounded(gradients + key, seen_part(share * (load_vector(d_scores + key) * factor - product)));
  };
  const std::int64_t whole = seen / lanes * lanes;
  for (std::int64_t key = 0; key < whole; key += lanes) step(key, [](Floats values) { return values; });
  for (std::int64_t key = whole; key < keys; key += lanes) {
    const auto sees = below(key, seen);
    step(key, [sees](Floats values) { return sees ? values : Floats{}; });
  }
}

}  // namespace

void attention_forward_bf16(Bf16Multiply multiply, const AttentionForward<bf16>& attention, const HeadPart& part,
                            float* workspace) {
  const AttentionShape& shape = attention.shape;
  const std::int64_t sequence = part.sequence, head = part.head;
  const std::int64_t size = shape.head_size, row = sequence * shape.seq, stride = shape.qkv_row();
  const std::int64_t kv_head = head * shape.kv_heads / shape.heads, tile = tile_of(shape);
  const bf16* const rows = attention.qkv + row * stride;
  const Rows queries{rows + head * size, stride}, keys{rows + (shape.heads + kv_head) * size, stride},
      values{rows + (shape.heads + shape.kv_heads + kv_head) * size, stride};
  const auto scale = binary_scale<float>(shape);
  const float kept = factor_of_kept(attention.dropout);
  const ForwardRooms rooms(shape, workspace);
  const Products products{multiply, bf16_room()};
  for (std::int64_t first = part.first; first < part.end; first += tile) {
    const std::int64_t count = std::min(tile, part.end - first);
    std::fill_n(rooms.out, count * size, 0.0F);
    std::fill_n(rooms.largest, count, -std::numeric_limits<float>::infinity());
    std::fill_n(rooms.sums, count, 0.0F);
    for (std::int64_t key = 0; key < first + count; key += tile) {
      const std::int64_t at_once = key == first ? diagonal_queries : tile;
      for (std::int64_t begin = 0; begin < count; begin += at_once) {
        const std::int64_t end      = std::min(count, begin + at_once);
        const std::int64_t num_keys = std::min(tile, first + end - key);
        products.set(queries.from(first + begin), transposed(keys.from(key)), end - begin, num_keys, size,
                     rooms.scores + begin * tile, tile);
        for (std::int64_t r = begin; r < end; ++r) {
          float* const scores     = rooms.scores + r * tile;
          const std::int64_t seen = std::min(num_keys, first + r - key + 1);
          const float shrink      = exponentiate(scores, seen, num_keys, scale, rooms.largest[r], rooms.sums[r]);
          if (key > 0) {
            float* const out = rooms.out + r * size;
            for (std::int64_t i = 0; i < size; ++i) out[i] *= shrink;
          }
          if (!attention.dropout) round_row(scores, num_keys, rooms.shares + r * tile);
        }
        if (attention.dropout) {
          const TileMask mask = tile_mask(*attention.dropout, shape, sequence, head, first + begin, key);
          mask.apply<float>(end - begin, shape.seq, num_keys, 1, [&](std::int64_t r, std::int64_t c, float factor) {
            if (factor == 0) rooms.scores[(begin + r) * tile + c] = 0;
          });
          for (std::int64_t r = begin; r < end; ++r)
            round_row(rooms.scores + r * tile, num_keys, rooms.shares + r * tile);
        }
        products.add({rooms.shares + begin * tile, tile, 1}, values.from(key), end - begin, size, num_keys,
                     rooms.out + begin * size, size);
      }
    }
    for (std::int64_t r = 0; r < count; ++r) {
      const float* const from = rooms.out + r * size;
      bf16* const to          = attention.out + (row + first + r) * shape.out_row() + head * size;
      const float share       = kept / rooms.sums[r];
      for (std::int64_t i = 0; i < size; ++i) to[i] = narrow<bf16>(from[i] * share);
      attention.log_sums[(row + first + r) * shape.heads + head] = rooms.largest[r] + std::log2(rooms.sums[r]);
    }
  }
}

void attention_backward_bf16(Bf16Multiply multiply, const AttentionBackward<bf16>& attention, const Into<bf16>& d_qkv,
                             std::int64_t sequence, std::int64_t kv_head, float* workspace) {
  const AttentionShape& shape = attention.shape;
  const std::int64_t size = shape.head_size, row = sequence * shape.seq, stride = shape.qkv_row();
  const std::int64_t group = shape.heads / shape.kv_heads, first_head = kv_head * group;
  const std::int64_t key_head = shape.heads + kv_head, value_head = key_head + shape.kv_heads, tile = tile_of(shape);
  const bf16* const rows = attention.qkv + row * stride;
  const Rows keys{rows + key_head * size, stride}, values{rows + value_head * size, stride};
  const auto scale = binary_scale<float>(shape);
  const BackwardRooms rooms(shape, workspace);
  const Products products{multiply, bf16_room()};
  const auto put_rows = [&](std::int64_t first, std::int64_t count, std::int64_t head, const float* from,
                            float factor) {
    for (std::int64_t r = 0; r < count; ++r) {
      const float* const at = from + r * size;
      put(d_qkv, (row + first + r) * stride + head * size, size, [=](std::int64_t i) { return at[i] * factor; });
    }
  };
  std::fill_n(rooms.d_queries, group * shape.seq * size, 0.0F);
  for (std::int64_t head = first_head; head < first_head + group; ++head) {
    for (std::int64_t r = 0; r < shape.seq; ++r) {
      const std::int64_t at   = (row + r) * shape.out_row() + head * size;
      const bf16* const out   = attention.out + at;
      const bf16* const d_out = attention.d_out + at;
      attention.products[(row + r) * shape.heads + head] =
          lane_sum<float>(size, [=](std::int64_t i) { return wide(out[i]) * wide(d_out[i]); });
    }
  }
  for (std::int64_t key = 0; key < shape.seq; key += tile) {
    const std::int64_t num_keys = std::min(tile, shape.seq - key);
    std::fill_n(rooms.d_keys, 2 * tile * size, 0.0F);  // d_keys and d_values
    for (std::int64_t head = first_head; head < first_head + group; ++head) {
      const Rows queries{rows + head * size, stride},
          d_out{attention.d_out + row * shape.out_row() + head * size, shape.out_row()};
      std::int64_t count = 0;
      for (std::int64_t first = key; first < shape.seq; first += count) {
        count = std::min(first < key + tile ? std::min(diagonal_queries, key + tile - first) : tile, shape.seq - first);
        const std::int64_t num_seen = std::min(num_keys, first + count - key);
        products.set(queries.from(first), transposed(keys.from(key)), count, num_seen, size, rooms.scores, tile);
        products.set(d_out.from(first), transposed(values.from(key)), count, num_seen, size, rooms.d_scores, tile);
        if (attention.dropout) {
          const TileMask mask = tile_mask(*attention.dropout, shape, sequence, head, first, key);
          mask.apply<float>(count, shape.seq, num_seen, 1, [&](std::int64_t r, std::int64_t c, float factor) {
            rooms.factors[r * tile + c] = factor;
          });
        }
        for (std::int64_t r = 0; r < count; ++r) {
          const std::int64_t at = (row + first + r) * shape.heads + head, in_tile = r * tile;
          to_gradients(rooms.scores + in_tile, rooms.d_scores + in_tile,
                       attention.dropout ? rooms.factors + in_tile : nullptr, std::min(num_seen, first + r - key + 1),
                       num_seen, scale, attention.log_sums[at], attention.products[at], rooms.shares + in_tile,
                       rooms.gradients + in_tile);
        }
        const Matrix<bf16> shares{rooms.shares, tile, 1}, gradients{rooms.gradients, tile, 1};
        products.add(transposed(shares), d_out.from(first), num_seen, size, count, rooms.d_values, size);
        products.add(transposed(gradients), queries.from(first), num_seen, size, count, rooms.d_keys, size);
        products.add(gradients, keys.from(key), count, size, num_seen,
                     rooms.d_queries + ((head - first_head) * shape.seq + first) * size, size);
      }
    }
    put_rows(key, num_keys, key_head, rooms.d_keys, static_cast<float>(shape.scale));
    put_rows(key, num_keys, value_head, rooms.d_values, factor_of_kept(attention.dropout));
  }
  for (std::int64_t i = 0; i < group; ++i)
    put_rows(0, shape.seq, first_head + i, rooms.d_queries + i * shape.seq * size, static_cast<float>(shape.scale));
}

std::int64_t attention_forward_bf16_workspace(const AttentionShape& shape) {
  const std::int64_t tile = tile_of(shape);
  return tile * tile + tile * shape.head_size + 2 * tile + tile * tile / 2;
}
std::int64_t attention_backward_bf16_workspace(const AttentionShape& shape) {
  const std::int64_t tile = tile_of(shape);
  return 3 * tile * tile + 2 * tile * shape.head_size + tile * tile +
         shape.heads / shape.kv_heads * shape.seq * shape.head_size;
}

}  // namespace stepgraph::cpu
#if defined(__clang__) && defined(STEPGRAPH_AVX512)
#pragma clang attribute pop
#endif
