#pragma once
#include <algorithm>
#include <cstdint>

// The bytes of DeviceQueue::workspace that each op uses: formulas of shapes and types. An op declares them for its node
// (OpNode::workspace_bytes), and its kernel takes as much as the same function says; so a plan is right without a
// device. Bits depend on these formulas, not on the size of a workspace that is larger. Without CUDA types. Internal to
// ops/.
namespace stepgraph::cuda {

inline constexpr std::int64_t workspace_alignment = 256;

// The bytes that Workspace::take uses for `count` elements.
[[nodiscard]] constexpr std::int64_t taken_bytes(std::int64_t count, std::int64_t element_bytes) {
  return (count * element_bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
}

[[nodiscard]] constexpr std::int64_t divided_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// --- sums over rows: ops/cuda/layers/column_sum.cuh ------------------------------------------------------------------

// Blocks of rows, each summed by one thread block; the sums of all blocks lie in the workspace.
struct ColumnBlocks {
  std::int64_t rows_per_block;
  std::int64_t num_blocks;
};
inline constexpr int sum_lanes = 32, sum_warps = 16;  // of a thread block: lanes along columns, warps along rows
// `rows_at_once`: rows that a warp loads together. As many thread blocks as a large device runs at once, two on each of
// 132 multiprocessors, or fewer. The number depends on the shape alone, so that sums do not depend on the device.
[[nodiscard]] constexpr ColumnBlocks column_blocks(std::int64_t rows, std::int64_t width, std::int64_t element_bytes,
                                                   int rows_at_once) {
  constexpr std::int64_t blocks_wanted = 264;
  const std::int64_t step              = std::int64_t{sum_warps} * rows_at_once;
  const std::int64_t tiles             = std::max<std::int64_t>(1, divided_up(width, sum_lanes * 16 / element_bytes));
  const std::int64_t most              = std::max<std::int64_t>(1, blocks_wanted / tiles);
  const std::int64_t of_each           = std::max(step, divided_up(divided_up(rows, most), step) * step);
  return {of_each, std::max<std::int64_t>(1, divided_up(rows, of_each))};
}
[[nodiscard]] constexpr std::int64_t column_sums_workspace(std::int64_t rows, std::int64_t width,
                                                           std::int64_t element_bytes, int rows_at_once, int num_sums) {
  const std::int64_t wide_bytes = std::max<std::int64_t>(element_bytes, 4);
  if (width <= 0) return 0;
  return taken_bytes(num_sums * column_blocks(rows, width, element_bytes, rows_at_once).num_blocks * width, wide_bytes);
}
// Of column_sum, and of norm_weight_gradient.
inline constexpr int column_rows_at_once = 8, dropped_rows_at_once = 4, norm_rows_at_once = 3;
[[nodiscard]] constexpr std::int64_t column_sum_workspace(std::int64_t rows, std::int64_t width,
                                                          std::int64_t element_bytes, bool drops) {
  return column_sums_workspace(rows, width, element_bytes, drops ? dropped_rows_at_once : column_rows_at_once, 1);
}
[[nodiscard]] constexpr std::int64_t norm_weight_workspace(std::int64_t rows, std::int64_t width,
                                                           std::int64_t element_bytes, bool centered) {
  return column_sums_workspace(rows, width, element_bytes, norm_rows_at_once, centered ? 2 : 1);
}

// --- cross_entropy_total: one sum for each block of rows -------------------------------------------------------------

inline constexpr int loss_threads = 256;
[[nodiscard]] constexpr std::int64_t cross_entropy_workspace(std::int64_t rows) {
  return taken_bytes(divided_up(rows, loss_threads), 8);
}

// --- rotate: a cosine and a sine for each position and frequency -----------------------------------------------------

// The positions whose angles are in the workspace at a time.
[[nodiscard]] constexpr std::int64_t rotary_positions(std::int64_t seq, std::int64_t head_size,
                                                      std::int64_t wide_bytes) {
  constexpr std::int64_t most = std::int64_t{32} << 20;
  return std::clamp<std::int64_t>(most / std::max<std::int64_t>(1, head_size * wide_bytes), 1,
                                  std::max<std::int64_t>(1, seq));
}
[[nodiscard]] constexpr std::int64_t rotary_workspace(std::int64_t seq, std::int64_t head_size,
                                                      std::int64_t wide_bytes) {
  return taken_bytes(rotary_positions(seq, head_size, wide_bytes) * (head_size / 2), 2 * wide_bytes);
}

// --- embedding_gradient: lists of tokens by row, and partial sums of rows with many tokens ---------------------------

inline constexpr int few_tokens = 32;  // of a row: ordered by comparison, and summed at once
struct EmbeddingSums {
  std::int64_t tokens_per_sum;
  // A row of c tokens has partial sums only if it has more than one: at most 2 c / tokens_per_sum.
  std::int64_t num_parts;
  std::int64_t num_sums;   // at most
  std::int64_t most_many;  // rows with more than few_tokens tokens
  std::int64_t workspace_bytes;
};
[[nodiscard]] constexpr EmbeddingSums embedding_sums(std::int64_t count, std::int64_t rows, std::int64_t width,
                                                     std::int64_t wide_bytes) {
  constexpr std::int64_t most = std::int64_t{256} << 20;  // of the partial sums
  EmbeddingSums sums{.tokens_per_sum = few_tokens, .num_parts = 0, .num_sums = 0, .most_many = 0, .workspace_bytes = 0};
  if (count <= 0 || rows <= 0 || width <= 0) return sums;
  while (2 * (count / sums.tokens_per_sum) * width * wide_bytes > most) sums.tokens_per_sum *= 2;
  sums.num_parts       = 2 * (count / sums.tokens_per_sum);
  sums.num_sums        = std::min(rows, count) + count / sums.tokens_per_sum;
  sums.most_many       = count / (few_tokens + 1);
  sums.workspace_bytes = taken_bytes(4 + 2 * rows, 4) + 2 * taken_bytes(rows, 4) + 2 * taken_bytes(count, 4) +
                         taken_bytes(sums.num_sums, 8) + taken_bytes(sums.most_many, 4) +
                         taken_bytes(sums.num_parts * width, wide_bytes);
  return sums;
}

// --- products: ops/cuda/gemm/choice.cuh ------------------------------------------------------------------------------

// What the library may use: room for the partial sums of split-k, whose tiles have up to 256 rows and columns. The
// library chooses its algorithm for exactly this size.
[[nodiscard]] constexpr std::int64_t library_workspace_bytes(std::int64_t m, std::int64_t n, std::int64_t k,
                                                             std::int64_t wide_bytes) {
  constexpr std::int64_t most = std::int64_t{64} << 20, tile = 256, most_splits = 32, least_k = 64;
  const std::int64_t splits = std::clamp<std::int64_t>(divided_up(k, least_k), 1, most_splits);
  const double bytes        = static_cast<double>(divided_up(m, tile) * tile) *
                       static_cast<double>(divided_up(n, tile) * tile) * static_cast<double>(splits * wide_bytes);
  return bytes < static_cast<double>(most) ? static_cast<std::int64_t>(bytes) : most;
}
// Products that are measured when they are first seen.
[[nodiscard]] constexpr bool is_measured(std::int64_t m, std::int64_t n, std::int64_t k) {
  constexpr double worth_measuring = 1e9;  // flops: a few us
  return 2 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) >= worth_measuring;
}
// Results of measurements, behind the library's share.
inline constexpr std::int64_t product_notes_bytes = 256;
[[nodiscard]] constexpr std::int64_t product_workspace(std::int64_t m, std::int64_t n, std::int64_t k,
                                                       std::int64_t wide_bytes) {
  if (m <= 0 || n <= 0 || k <= 0) return 0;
  return library_workspace_bytes(m, n, k, wide_bytes) + (is_measured(m, n, k) ? product_notes_bytes : 0);
}
// In addition for a product that adds to its output in place: a copy of the output while algorithms are measured. An
// output that is larger than the limit is not measured; the library's first choice has the same bits.
[[nodiscard]] constexpr std::int64_t product_in_place_workspace(std::int64_t m, std::int64_t n, std::int64_t k,
                                                                std::int64_t out_bytes) {
  constexpr std::int64_t most = std::int64_t{192} << 20;
  if (m <= 0 || n <= 0 || !is_measured(m, n, k) || m > most / out_bytes / n) return 0;
  return taken_bytes(m * n, out_bytes);
}

// --- attention by cuDNN ----------------------------------------------------------------------------------------------

// Whether the shape is one for cuDNN: heads of 32 to 128 elements, in multiples of 8, whole tiles of 128 positions,
// 2-byte elements.
[[nodiscard]] constexpr bool is_dnn_attention(std::int64_t seq, std::int64_t head_size, std::int64_t element_bytes) {
  return element_bytes == 2 && seq % 128 == 0 && head_size % 8 == 0 && head_size >= 32 && head_size <= 128;
}
// cuDNN says how much a plan needs only when there is a device, so these are upper bounds; a plan that needs more is
// not used. Forward: a few numbers for each query. Backward of some sequences: the score gradients in T, from which dQ
// is a product of its own; and, as slack for what a kernel may add, sums in f32 for dQ and for dK and dV of each head.
inline constexpr std::int64_t dnn_attention_slack = std::int64_t{1} << 20;
[[nodiscard]] constexpr std::int64_t dnn_forward_workspace(std::int64_t sequences, std::int64_t seq,
                                                           std::int64_t heads) {
  return taken_bytes(sequences * heads * seq, 8) + dnn_attention_slack;
}
// As many sequences at a time as fit the limit, at least one.
[[nodiscard]] constexpr std::int64_t dnn_backward_workspace(std::int64_t sequences, std::int64_t seq,
                                                            std::int64_t heads, std::int64_t head_size) {
  constexpr std::int64_t most = std::int64_t{1} << 30;
  const std::int64_t of_query = 2 * seq + 3 * 4 * head_size + 8, of_one = heads * seq * of_query;
  const std::int64_t at_once = std::clamp<std::int64_t>((most - dnn_attention_slack) / of_one, 1, sequences);
  // Of more sequences than fit: the limit itself, since cuDNN may need less than the bound for each.
  return at_once < sequences ? std::max(most, taken_bytes(of_one, 1) + dnn_attention_slack)
                             : taken_bytes(at_once * of_one, 1) + dnn_attention_slack;
}

}  // namespace stepgraph::cuda
