#pragma once
#include "ops/cuda/attention/attention.hpp"

// Attention by cuDNN's fused kernels. Plans are made once for each shape, and kept.
namespace stepgraph::cuda {

// Whether forward attention is cuDNN's: heads of 64 or 128, whole tiles of 128 positions, and no dropout, whose mask
// cuDNN would choose. log_sums are then natural logarithms, [sequence, head, position]. The same for a forward and its
// backward. T is bf16 or f16.
template <class T>
[[nodiscard]] bool dnn_attends(const DeviceQueue& queue, const AttentionShape& shape, std::int64_t sequences,
                               const T* qkv, const T* out, const AttentionDropout& dropout);

template <class T>
void dnn_attention_forward(const DeviceQueue& queue, const AttentionForward<T>& attention);

// Where cuDNN's backward cannot be used, does nothing and returns false: where there is something to add to, or no room
// in the workspace for one sequence's gradients of scores, in T. More room is more sequences at a time.
template <class T>
[[nodiscard]] bool dnn_attention_backward(const DeviceQueue& queue, const AttentionBackward<T>& attention,
                                          const Into<T>& d_qkv);

}  // namespace stepgraph::cuda
