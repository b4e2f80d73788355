#include "ops/cpu/attention.hpp"

#include <algorithm>
#include <cmath>

#include "ops/cpu/elementary.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/lanes.hpp"
#include "ops/cpu/small_product.hpp"

namespace stepgraph::cpu {
namespace {

// So many queries are worked on at a time: a row of scores for each is in the workspace.
constexpr std::int64_t query_rows = 32;

std::int64_t padded(std::int64_t seq) { return (seq + 15) / 16 * 16; }  // whole panels in every type

// Where the heads of one sequence and one key and value head are, in qkv or in its gradient.
template <class T>
struct HeadRows {
  const T *keys, *values;  // [seq, head_size], rows a row of qkv apart
  std::int64_t first_row;  // of the sequence
  std::int64_t first_query, end_query;
};
template <class T>
HeadRows<T> head_rows(const AttentionShape& shape, const T* qkv, std::int64_t sequence, std::int64_t kv_head) {
  const std::int64_t first_row = sequence * shape.seq;
  const T* rows                = qkv + first_row * shape.qkv_row();
  const std::int64_t group     = shape.heads / shape.kv_heads;  // query head h looks at h / group
  return {.keys        = rows + (shape.heads + kv_head) * shape.head_size,
          .values      = rows + (shape.heads + shape.kv_heads + kv_head) * shape.head_size,
          .first_row   = first_row,
          .first_query = kv_head * group,
          .end_query   = (kv_head + 1) * group};
}

// [seq, head_size] transposed, in panels of tile_cols columns that lie one after the other; the last is filled up with
// zeros.
template <class T>
void pack_panels(const T* rows, const AttentionShape& shape, T* panels) {
  constexpr std::int64_t width = tile_cols<T>;
  for (std::int64_t first = 0; first < shape.seq; first += width) {
    T* panel                 = panels + first * shape.head_size;
    const std::int64_t valid = std::min(width, shape.seq - first);
    for (std::int64_t i = 0; i < shape.head_size; ++i) {
      for (std::int64_t c = 0; c < valid; ++c) panel[i * width + c] = rows[(first + c) * shape.qkv_row() + i];
      std::fill(panel + i * width + valid, panel + (i + 1) * width, T(0));
    }
  }
}

// A few rows of one query head, times panels: out[r][j] for all j that row r's group of tile_rows sees.
template <class T>
void multiply_panels(const T* rows, std::int64_t row_stride, const T* panels, const AttentionShape& shape,
                     std::int64_t first, std::int64_t count, T* out) {
  constexpr std::int64_t width = tile_cols<T>;
  const std::int64_t out_row   = padded(shape.seq);
  for (std::int64_t key = 0; key < first + count; key += width) {
    for (std::int64_t r = 0; r < count; r += tile_rows) {
      const std::int64_t group = std::min<std::int64_t>(tile_rows, count - r);
      if (first + r + group <= key) continue;  // sees none of this panel
      multiply<T>({.depth = shape.head_size,
                   .a     = rows + r * row_stride,
                   .a_row = row_stride,
                   .a_col = 1,
                   .b     = panels + key * shape.head_size,
                   .b_row = width,
                   .c     = out + r * out_row + key,
                   .c_row = out_row,
                   .add   = false},
                  group, width);
    }
  }
}

// Rows of scores times rows of keys or values: out[r] = sum over the keys that r's group sees.
template <class T>
void multiply_rows(const T* scores, const T* rows, const AttentionShape& shape, std::int64_t first, std::int64_t count,
                   T* out, std::int64_t out_row) {
  const std::int64_t scores_row = padded(shape.seq);
  for (std::int64_t r = 0; r < count; r += tile_rows) {
    const std::int64_t group = std::min<std::int64_t>(tile_rows, count - r);
    multiply<T>({.depth = first + r + group,
                 .a     = scores + r * scores_row,
                 .a_row = scores_row,
                 .a_col = 1,
                 .b     = rows,
                 .b_row = shape.qkv_row(),
                 .c     = out + r * out_row,
                 .c_row = out_row,
                 .add   = false},
                group, shape.head_size);
  }
}

// sums[key] += scores[r][key] * rows[r], over the queries r that see the key.
template <class T>
void add_transposed(const T* scores, const T* rows, std::int64_t row_stride, const AttentionShape& shape,
                    std::int64_t first, std::int64_t count, T* sums) {
  const std::int64_t scores_row = padded(shape.seq);
  for (std::int64_t key = 0; key < first + count; key += tile_rows) {
    const std::int64_t group = std::min<std::int64_t>(tile_rows, first + count - key);
    const std::int64_t from  = std::max<std::int64_t>(0, key - first);
    multiply<T>({.depth = count - from,
                 .a     = scores + from * scores_row + key,
                 .a_row = 1,
                 .a_col = scores_row,
                 .b     = rows + from * row_stride,
                 .b_row = row_stride,
                 .c     = sums + key * shape.head_size,
                 .c_row = shape.head_size,
                 .add   = true},
                group, shape.head_size);
  }
}

template <class T>
T largest(const T* values, std::int64_t size) {
  constexpr int lanes = elements_per_vector<T>;
  T most              = values[0];
  std::int64_t i      = 0;
  if (size >= lanes) {
    Vector<T> of_lanes = load_vector(values);
    for (i = lanes; i + lanes <= size; i += lanes) {
      const Vector<T> more = load_vector(values + i);
      of_lanes             = more > of_lanes ? more : of_lanes;
    }
    for (int lane = 0; lane < lanes; ++lane) most = std::max(most, of_lanes[lane]);
  }
  for (; i < size; ++i) most = std::max(most, values[i]);
  return most;
}

}  // namespace

std::int64_t attention_forward_workspace(const AttentionShape& shape) {
  return padded(shape.seq) * (shape.head_size + query_rows);
}

std::int64_t attention_backward_workspace(const AttentionShape& shape) {
  return padded(shape.seq) * (4 * shape.head_size + 2 * query_rows) + query_rows * shape.head_size;
}

template <class T>
void attention_forward(const AttentionForward<T>& attention, std::int64_t sequence, std::int64_t kv_head,
                       T* workspace) {
  const AttentionShape& shape   = attention.shape;
  const HeadRows<T> at          = head_rows(shape, attention.qkv, sequence, kv_head);
  const std::int64_t scores_row = padded(shape.seq);
  const auto scale              = static_cast<T>(shape.scale);
  T *panels = workspace, *scores = panels + scores_row * shape.head_size;
  pack_panels(at.keys, shape, panels);
  for (std::int64_t head = at.first_query; head < at.end_query; ++head) {
    for (std::int64_t first = 0; first < shape.seq; first += query_rows) {
      const std::int64_t count = std::min(query_rows, shape.seq - first), row = at.first_row + first;
      const T* queries = attention.qkv + row * shape.qkv_row() + head * shape.head_size;
      T* out           = attention.out + row * shape.out_row() + head * shape.head_size;
      T sums[query_rows];
      multiply_panels(queries, shape.qkv_row(), panels, shape, first, count, scores);
      for (std::int64_t r = 0; r < count; ++r) {
        T* of_row               = scores + r * scores_row;
        const std::int64_t seen = first + r + 1;
        for (std::int64_t j = 0; j < seen; ++j) of_row[j] *= scale;
        const T most = largest(of_row, seen);
        for (std::int64_t j = 0; j < seen; ++j) of_row[j] = cpu::exp(of_row[j] - most);
        std::fill(of_row + seen, of_row + first + count, T(0));
        sums[r] = lane_sum<T>(seen, [of_row](std::int64_t j) { return of_row[j]; });
        attention.log_sums[(row + r) * shape.heads + head] = most + std::log(sums[r]);
      }
      multiply_rows(scores, at.values, shape, first, count, out, shape.out_row());
      for (std::int64_t r = 0; r < count; ++r) {
        T* of_row = out + r * shape.out_row();
        for (std::int64_t i = 0; i < shape.head_size; ++i) of_row[i] /= sums[r];
      }
    }
  }
}

// With P the probabilities: dV = P^T dO; dP = dO V^T; dS = P (dP - rowsum(dO O)); dQ = scale dS K; dK = scale dS^T Q
// (FlashAttention-2, section 2.3.2).
template <class T>
void attention_backward(const AttentionBackward<T>& attention, const Into<T>& d_qkv, std::int64_t sequence,
                        std::int64_t kv_head, T* workspace) {
  const AttentionShape& shape   = attention.shape;
  const HeadRows<T> at          = head_rows(shape, attention.qkv, sequence, kv_head);
  const std::int64_t scores_row = padded(shape.seq), size = shape.head_size, out_row = shape.out_row();
  const auto scale = static_cast<T>(shape.scale);
  T *key_panels = workspace, *value_panels = key_panels + scores_row * size, *d_keys = value_panels + scores_row * size,
    *d_values = d_keys + scores_row * size, *scores = d_values + scores_row * size,
    *d_scores = scores + query_rows * scores_row, *d_queries = d_scores + query_rows * scores_row;
  pack_panels(at.keys, shape, key_panels);
  pack_panels(at.values, shape, value_panels);
  std::fill(d_keys, d_values + scores_row * size, T(0));
  for (std::int64_t head = at.first_query; head < at.end_query; ++head) {
    for (std::int64_t first = 0; first < shape.seq; first += query_rows) {
      const std::int64_t count = std::min(query_rows, shape.seq - first), row = at.first_row + first;
      const T* queries = attention.qkv + row * shape.qkv_row() + head * size;
      const T *out     = attention.out + row * out_row + head * size,
              *d_out   = attention.d_out + row * out_row + head * size;
      multiply_panels(queries, shape.qkv_row(), key_panels, shape, first, count, scores);
      multiply_panels(d_out, out_row, value_panels, shape, first, count, d_scores);
      for (std::int64_t r = 0; r < count; ++r) {
        T *of_row = scores + r * scores_row, *d_row = d_scores + r * scores_row;
        const T *o = out + r * out_row, *d_o = d_out + r * out_row;
        const std::int64_t seen = first + r + 1;
        const T log_sum         = attention.log_sums[(row + r) * shape.heads + head];
        const T along           = lane_sum<T>(size, [=](std::int64_t i) { return d_o[i] * o[i]; });
        for (std::int64_t j = 0; j < seen; ++j) of_row[j] = cpu::exp(of_row[j] * scale - log_sum);
        for (std::int64_t j = 0; j < seen; ++j) d_row[j] = of_row[j] * (d_row[j] - along) * scale;
        std::fill(of_row + seen, of_row + first + count, T(0));
        std::fill(d_row + seen, d_row + first + count, T(0));
      }
      add_transposed(scores, d_out, out_row, shape, first, count, d_values);
      add_transposed(d_scores, queries, shape.qkv_row(), shape, first, count, d_keys);
      multiply_rows(d_scores, at.keys, shape, first, count, d_queries, size);
      for (std::int64_t r = 0; r < count; ++r) {
        const T* d_row = d_queries + r * size;
        put(d_qkv, (row + r) * shape.qkv_row() + head * size, size, [d_row](std::int64_t i) { return d_row[i]; });
      }
    }
  }
  const std::int64_t key_offset = (shape.heads + kv_head) * size, value_offset = key_offset + shape.kv_heads * size;
  for (std::int64_t position = 0; position < shape.seq; ++position) {
    const std::int64_t row = (at.first_row + position) * shape.qkv_row();
    const T *d_key = d_keys + position * size, *d_value = d_values + position * size;
    put(d_qkv, row + key_offset, size, [d_key](std::int64_t i) { return d_key[i]; });
    put(d_qkv, row + value_offset, size, [d_value](std::int64_t i) { return d_value[i]; });
  }
}

template void attention_forward<float>(const AttentionForward<float>&, std::int64_t, std::int64_t, float*);
template void attention_forward<double>(const AttentionForward<double>&, std::int64_t, std::int64_t, double*);
template void attention_backward<float>(const AttentionBackward<float>&, const Into<float>&, std::int64_t, std::int64_t,
                                        float*);
template void attention_backward<double>(const AttentionBackward<double>&, const Into<double>&, std::int64_t,
                                         std::int64_t, double*);

}  // namespace stepgraph::cpu
