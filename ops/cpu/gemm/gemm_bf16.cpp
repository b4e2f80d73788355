#include "ops/cpu/gemm/gemm_bf16.hpp"

#include <memory>

#include "ops/cpu/instructions.hpp"

namespace stepgraph::cpu {

Bf16Room& bf16_room() {
  static thread_local const std::unique_ptr<Bf16Room> made(new Bf16Room);
  return *made;
}

Bf16Multiply best_bf16_product() {
  switch (product_instructions()) {
#if defined(__aarch64__)
    case Instructions::neon_bf16:
      return multiply_neon_bf16<float>;
    case Instructions::sve:
      return has(Instructions::neon_bf16) ? multiply_neon_bf16<float> : nullptr;
#elif defined(__x86_64__)
    case Instructions::avx512_bf16:
      return multiply_avx512_bf16<float>;
    case Instructions::amx:
      return multiply_amx<float>;
#endif
    default:
      return nullptr;
  }
}

}  // namespace stepgraph::cpu
