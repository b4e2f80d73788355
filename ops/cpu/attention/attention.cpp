#include "ops/cpu/attention/attention.hpp"

#include <concepts>

#include "ops/cpu/attention/attention_bf16.hpp"
#include "ops/cpu/attention/attention_levels.hpp"
#include "ops/cpu/instructions.hpp"

// Calls the kernel for the best instructions that this machine has.
#if defined(__x86_64__)
#define STEPGRAPH_BEST(call)                        \
  switch (best_instructions()) {                    \
    case Instructions::avx512:                      \
      return attention_kernels::avx512::call;       \
    case Instructions::avx2:                        \
      return attention_kernels::avx2::call;         \
    default:                                        \
      return attention_kernels::of_the_build::call; \
  }
#else
#define STEPGRAPH_BEST(call) return attention_kernels::of_the_build::call
#endif

namespace stepgraph::cpu {

template <class T>
void attention_forward(const AttentionForward<T>& attention, const HeadPart& part, Wide<T>* workspace) {
  if constexpr (std::same_as<T, bf16>) {
    if (auto* const multiply = best_bf16_product()) return attention_forward_bf16(multiply, attention, part, workspace);
  }
  STEPGRAPH_BEST(forward<T>(attention, part, workspace));
}

template <class T>
void attention_backward(const AttentionBackward<T>& attention, const Into<T>& d_qkv, std::int64_t sequence,
                        std::int64_t kv_head, Wide<T>* workspace) {
  if constexpr (std::same_as<T, bf16>) {
    if (auto* const multiply = best_bf16_product())
      return attention_backward_bf16(multiply, attention, d_qkv, sequence, kv_head, workspace);
  }
  STEPGRAPH_BEST(backward<T>(attention, d_qkv, sequence, kv_head, workspace));
}

template <class T>
std::int64_t attention_forward_workspace(const AttentionShape& shape) {
  if constexpr (std::same_as<T, bf16>) {
    if (best_bf16_product() != nullptr) return attention_forward_bf16_workspace(shape);
  }
  STEPGRAPH_BEST(forward_workspace<T>(shape));
}

template <class T>
std::int64_t attention_backward_workspace(const AttentionShape& shape) {
  if constexpr (std::same_as<T, bf16>) {
    if (best_bf16_product() != nullptr) return attention_backward_bf16_workspace(shape);
  }
  STEPGRAPH_BEST(backward_workspace<T>(shape));
}

#define STEPGRAPH_ATTENTION(T)                                                                                 \
  template void attention_forward<T>(const AttentionForward<T>&, const HeadPart&, Wide<T>*);                   \
  template void attention_backward<T>(const AttentionBackward<T>&, const Into<T>&, std::int64_t, std::int64_t, \
                                      Wide<T>*);                                                               \
  template std::int64_t attention_forward_workspace<T>(const AttentionShape&);                                 \
  template std::int64_t attention_backward_workspace<T>(const AttentionShape&)
STEPGRAPH_ATTENTION(float);
STEPGRAPH_ATTENTION(double);
STEPGRAPH_ATTENTION(bf16);
STEPGRAPH_ATTENTION(f16);
#undef STEPGRAPH_ATTENTION
#undef STEPGRAPH_BEST

}  // namespace stepgraph::cpu
