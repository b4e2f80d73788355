#pragma once
#include "ops/cuda/attention/attention.hpp"

// Attention by cuDNN's fused kernels. Plans are created once per shape and kept.
namespace stepgraph::cuda {

// Whether cuDNN computes forward attention: heads of 32 to 128 elements in multiples of 8, whole tiles of 128 positions,
// and no dropout (cuDNN would choose its own mask), and a plan that needs no more workspace than dnn_forward_workspace. log_sums are then
// natural logarithms, [sequence, head, position]. The answer is the same for a forward and its backward. T is bf16 or
// f16.
template <class T>
[[nodiscard]] bool dnn_attends(const DeviceQueue& queue, const AttentionShape& shape, std::int64_t sequences,
                               const T* qkv, const T* out, const AttentionDropout& dropout);

template <class T>
void dnn_attention_forward(const DeviceQueue& queue, const AttentionForward<T>& attention);

// Returns false and does nothing if cuDNN's backward cannot be used: if there is a base to add to, or if cuDNN needs
// more than dnn_backward_workspace for one sequence. Computes as many sequences at a time as fit there.
template <class T>
[[nodiscard]] bool dnn_attention_backward(const DeviceQueue& queue, const AttentionBackward<T>& attention,
                                          const Into<T>& d_qkv);

}  // namespace stepgraph::cuda
