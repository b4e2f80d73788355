#include "ops/cuda/attention/dnn_attention_graph.cuh"

namespace stepgraph::cuda {
namespace {

// A graph with the parts that forward and backward share.
struct AttentionGraph {
  using Dims   = DnnGraph::Dims;
  using Tensor = DnnGraph::Tensor;
  DnnGraph graph;
  const AttentionShape& shape;
  std::int64_t sequences;
  cudnnDataType_t type;

  // Heads of rows of qkv or of out. `across`: transposed.
  Tensor rows(std::int64_t number, std::int64_t heads, std::int64_t row, bool across = false) {
    const std::int64_t all = shape.seq * row, size = shape.head_size;
    if (across) return graph.tensor(number, type, {sequences, heads, size, shape.seq}, {all, size, 1, row});
    return graph.tensor(number, type, {sequences, heads, shape.seq, size}, {all, size, row, 1});
  }
  // One number per query.
  [[nodiscard]] Dims of_queries() const { return {sequences, shape.heads, shape.seq, 1}; }
  Tensor of_queries(std::int64_t number) {
    return graph.tensor(number, CUDNN_DATA_FLOAT, of_queries(), {shape.heads * shape.seq, shape.seq, 1, 1});
  }
  [[nodiscard]] Dims scores() const { return {sequences, shape.heads, shape.seq, shape.seq}; }
  Tensor unary(cudnnPointwiseMode_t mode, Tensor x, const Dims& dims) {
    const Tensor y = graph.inner(dims);
    graph.pointwise(mode, x, y);
    return y;
  }
  Tensor binary(cudnnPointwiseMode_t mode, Tensor x, Tensor b, const Dims& dims) {
    const Tensor y = graph.inner(dims);
    graph.pointwise(mode, x, b, y);
    return y;
  }
  Tensor product(Tensor a, Tensor b, const Dims& dims) {
    const Tensor c = graph.inner(dims);
    graph.matmul(a, b, c);
    return c;
  }
  // Replaces the scores of masked keys by `nothing`.
  Tensor causal(Tensor x) {
    const Tensor row = graph.inner(scores(), CUDNN_DATA_INT32), col = graph.inner(scores(), CUDNN_DATA_INT32),
                 sees = graph.inner(scores(), CUDNN_DATA_BOOLEAN), y = graph.inner(scores());
    graph.index(x, 2, row);
    graph.index(x, 3, col);
    graph.pointwise(CUDNN_POINTWISE_CMP_GE, row, col, sees, CUDNN_DATA_BOOLEAN);
    graph.select(sees, x, graph.scalar(dnn_nothing), y);
    return y;
  }
  // Transposes x, in `type`, for a product.
  Tensor turned(Tensor x) {
    const Dims all = scores();
    const Tensor y = graph.inner(all, {all[1] * all[2] * all[3], all[2] * all[3], 1, all[3]}, type);
    graph.reshape(x, y);
    return y;
  }
  // The product of x^T and rows of queries, for each key. Sums over the heads of a group.
  void to_keys(Tensor x, Tensor rows_of_queries, Tensor y) {
    if (shape.heads == shape.kv_heads) return graph.matmul(turned(x), rows_of_queries, y);
    const Tensor each = graph.inner({sequences, shape.heads, shape.seq, shape.head_size}, type);
    graph.matmul(turned(x), rows_of_queries, each);
    graph.reduce(CUDNN_REDUCE_TENSOR_ADD, each, y);
  }
};

}  // namespace

std::unique_ptr<DnnPlan> plan_attention_forward(const DnnDevice& device, const AttentionShape& shape,
                                                std::int64_t sequences, cudnnDataType_t type) {
  AttentionGraph a{{}, shape, sequences, type};
  const auto queries  = a.rows(dnn_queries, shape.heads, shape.qkv_row()),
             keys     = a.rows(dnn_keys, shape.kv_heads, shape.qkv_row(), true),
             values   = a.rows(dnn_values, shape.kv_heads, shape.qkv_row()),
             out      = a.rows(dnn_out, shape.heads, shape.out_row());
  const auto products = a.product(queries, keys, a.scores());
  const auto scores   = a.causal(a.binary(CUDNN_POINTWISE_MUL, products, a.graph.scalar(dnn_scale), a.scores()));
  const auto most = a.graph.inner(a.of_queries()), sums = a.graph.inner(a.of_queries());
  a.graph.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, most);
  const auto powers = a.unary(CUDNN_POINTWISE_EXP, a.binary(CUDNN_POINTWISE_SUB, scores, most, a.scores()), a.scores());
  a.graph.reduce(CUDNN_REDUCE_TENSOR_ADD, powers, sums);
  a.graph.pointwise(CUDNN_POINTWISE_ADD, most, a.unary(CUDNN_POINTWISE_LOG, sums, a.of_queries()),
                    a.of_queries(dnn_log_sums));
  const auto shares = a.graph.inner(a.scores(), type);
  a.graph.pointwise(CUDNN_POINTWISE_DIV, powers, sums, shares);
  a.graph.matmul(shares, values, out);
  return a.graph.plan(device);
}

// dQ is a separate product, of score gradients that are stored in the workspace. If each tile of keys added to dQ, the
// order of the sums would be nondeterministic.
std::unique_ptr<DnnPlan> plan_attention_backward(const DnnDevice& device, const AttentionShape& shape,
                                                 std::int64_t sequences, cudnnDataType_t type) {
  AttentionGraph a{{}, shape, sequences, type};
  const auto queries = a.rows(dnn_queries, shape.heads, shape.qkv_row()),
             keys    = a.rows(dnn_keys, shape.kv_heads, shape.qkv_row(), true),
             values  = a.rows(dnn_values, shape.kv_heads, shape.qkv_row(), true),
             out     = a.rows(dnn_out, shape.heads, shape.out_row()),
             d_out = a.rows(dnn_d_out, shape.heads, shape.out_row()), products = a.of_queries(dnn_products),
             scale = a.graph.scalar(dnn_scale);
  const auto sums  = a.graph.inner(a.of_queries());
  a.graph.reduce(CUDNN_REDUCE_TENSOR_ADD,
                 a.binary(CUDNN_POINTWISE_MUL, d_out, out, {sequences, shape.heads, shape.seq, shape.head_size}), sums);
  a.graph.pointwise(CUDNN_POINTWISE_MUL, sums, a.graph.scalar(dnn_one), products);

  const auto scores = a.binary(CUDNN_POINTWISE_MUL, a.product(queries, keys, a.scores()), scale, a.scores());
  const auto shares =
      a.unary(CUDNN_POINTWISE_EXP,
              a.causal(a.binary(CUDNN_POINTWISE_SUB, scores, a.of_queries(dnn_log_sums), a.scores())), a.scores());
  a.to_keys(shares, d_out, a.rows(dnn_d_values, shape.kv_heads, shape.qkv_row()));

  const auto d_shares = a.binary(CUDNN_POINTWISE_SUB, a.product(d_out, values, a.scores()), products, a.scores());
  const auto d_scores =
      a.binary(CUDNN_POINTWISE_MUL, a.binary(CUDNN_POINTWISE_MUL, d_shares, shares, a.scores()), scale, a.scores());
  a.to_keys(d_scores, queries, a.rows(dnn_d_keys, shape.kv_heads, shape.qkv_row()));

  const auto key_rows = a.graph.inner({sequences, shape.kv_heads, shape.seq, shape.head_size},
                                      {shape.seq * shape.qkv_row(), shape.head_size, shape.qkv_row(), 1}, type);
  a.graph.reshape(keys, key_rows);
  a.graph.matmul(d_scores, key_rows, a.rows(dnn_d_queries, shape.heads, shape.qkv_row()));
  return a.graph.plan(device);
}

}  // namespace stepgraph::cuda
