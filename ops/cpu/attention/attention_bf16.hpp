#pragma once
#include "ops/cpu/attention/attention.hpp"
#include "ops/cpu/gemm/gemm_bf16.hpp"

// Attention of bf16 whose products are those of ops/cpu/gemm/gemm_bf16.hpp, by the product `multiply`. Probabilities and
// gradients of scores are rounded to bf16 before they are multiplied; everything else is f32.
namespace stepgraph::cpu {

void attention_forward_bf16(Bf16Multiply multiply, const AttentionForward<bf16>& attention, const HeadPart& part,
                            float* workspace);
void attention_backward_bf16(Bf16Multiply multiply, const AttentionBackward<bf16>& attention, const Into<bf16>& d_qkv,
                             std::int64_t sequence, std::int64_t kv_head, float* workspace);
[[nodiscard]] std::int64_t attention_forward_bf16_workspace(const AttentionShape& shape);
[[nodiscard]] std::int64_t attention_backward_bf16_workspace(const AttentionShape& shape);

}  // namespace stepgraph::cpu
