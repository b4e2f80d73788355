#pragma once
#include <cstdint>
#include <memory>

#include "ops/cuda/attention/dnn_graph.cuh"
#include "ops/shared/attention_shape.hpp"

// Attention in the form that cuDNN's fused kernels recognise, operation by operation.
namespace stepgraph::cuda {

// Numbers of the tensors passed to a plan. log_sums and products are [sequence, head, position]; log_sums are natural
// logarithms.
enum DnnAttentionTensor : std::int64_t {
  dnn_queries = 1,
  dnn_keys,
  dnn_values,
  dnn_out,
  dnn_log_sums,
  dnn_scale,    // scalar
  dnn_nothing,  // scalar: the score of a masked key
  dnn_one,      // scalar: 1
  dnn_d_out,
  dnn_products,
  dnn_d_queries,
  dnn_d_keys,
  dnn_d_values,
};

// Plans for the given number of sequences. Queries, keys, values and their gradients use the layout of qkv rows. Null
// if cuDNN has no plan, or none that gives the same bits in every run.
[[nodiscard]] std::unique_ptr<DnnPlan> plan_attention_forward(const DnnDevice& device, const AttentionShape& shape,
                                                              std::int64_t sequences, cudnnDataType_t type);
[[nodiscard]] std::unique_ptr<DnnPlan> plan_attention_backward(const DnnDevice& device, const AttentionShape& shape,
                                                               std::int64_t sequences, cudnnDataType_t type);

}  // namespace stepgraph::cuda
