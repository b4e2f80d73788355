#pragma once
#include <cstdint>
#include <memory>

#include "ops/attention_shape.hpp"
#include "ops/cuda/attention/dnn_graph.cuh"

// Attention as cuDNN recognises it: the operations of its fused kernels, one by one.
namespace stepgraph::cuda {

// What is passed to a plan, by number. log_sums and products are [sequence, head, position], the former of natural
// logarithms.
enum DnnAttentionTensor : std::int64_t {
  dnn_queries = 1,
  dnn_keys,
  dnn_values,
  dnn_out,
  dnn_log_sums,
  dnn_scale,    // scalar
  dnn_nothing,  // scalar: the score of a key that is not seen
  dnn_one,      // scalar: 1
  dnn_d_out,
  dnn_products,
  dnn_d_queries,
  dnn_d_keys,
  dnn_d_values,
};

// Plans for so many sequences, with queries, keys, values and their gradients where rows of qkv have them; none where
// cuDNN has none, or none that gives the same bits in every run.
[[nodiscard]] std::unique_ptr<DnnPlan> plan_attention_forward(const DnnDevice& device, const AttentionShape& shape,
                                                              std::int64_t sequences, cudnnDataType_t type);
[[nodiscard]] std::unique_ptr<DnnPlan> plan_attention_backward(const DnnDevice& device, const AttentionShape& shape,
                                                               std::int64_t sequences, cudnnDataType_t type);

}  // namespace stepgraph::cuda
