#pragma once
#include "ops/cpu/attention/attention.hpp"

// The kernels of attention for each kind of instructions; ops/cpu/attention/attention.hpp describes them.
#define STEPGRAPH_ATTENTION(level)                                                                  \
  namespace stepgraph::cpu::attention_kernels::level {                                              \
  template <class T>                                                                                \
  void forward(const AttentionForward<T>& attention, const HeadPart& part, Wide<T>* workspace);     \
  template <class T>                                                                                \
  void backward(const AttentionBackward<T>& attention, const Into<T>& d_qkv, std::int64_t sequence, \
                std::int64_t kv_head, Wide<T>* workspace);                                          \
  template <class T>                                                                                \
  std::int64_t forward_workspace(const AttentionShape& shape);                                      \
  template <class T>                                                                                \
  std::int64_t backward_workspace(const AttentionShape& shape);                                     \
  }
STEPGRAPH_ATTENTION(of_the_build)
STEPGRAPH_ATTENTION(avx2)
STEPGRAPH_ATTENTION(avx512)
#undef STEPGRAPH_ATTENTION
