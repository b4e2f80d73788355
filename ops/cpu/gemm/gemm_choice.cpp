#include "ops/cpu/gemm/gemm_choice.hpp"

#include "ops/cpu/gemm/blas.hpp"
#include "ops/cpu/instructions.hpp"

namespace stepgraph {
namespace cpu {

bool cblas_first() noexcept {
#ifdef STEPGRAPH_CBLAS_FIRST
  return true;
#else
  return false;
#endif
}

GemmKernel best_kernel() {
  const Instructions instructions = product_instructions();  // throws if the environment names others
  if (instructions == Instructions::sve) return GemmKernel::sve;
  if (has(GemmKernel::neon)) return GemmKernel::neon;
  switch (best_instructions()) {
    case Instructions::avx512:
      return GemmKernel::avx512;
    case Instructions::avx2:
      return GemmKernel::avx2;
    default:
      return GemmKernel::own;
  }
}

GemmKernel best_bf16_kernel() {
  switch (product_instructions()) {
    case Instructions::neon_bf16:
      return GemmKernel::neon_bf16;
    case Instructions::sve:
      return has(GemmKernel::neon_bf16) ? GemmKernel::neon_bf16 : GemmKernel::sve;
    case Instructions::avx512_bf16:
      return GemmKernel::avx512_bf16;
    case Instructions::amx:
      return GemmKernel::amx;
    default:
      return best_kernel();
  }
}

GemmKernel without_bf16(GemmKernel kernel) noexcept {
  if (kernel == GemmKernel::neon_bf16) return GemmKernel::neon;
  return kernel == GemmKernel::avx512_bf16 || kernel == GemmKernel::amx ? GemmKernel::avx512 : kernel;
}

}  // namespace cpu

bool has(GemmKernel kernel) noexcept {
  switch (kernel) {
    case GemmKernel::neon:
#ifdef __aarch64__
      return true;
#else
      return false;
#endif
    case GemmKernel::sve:
      return cpu::has(cpu::Instructions::sve);
    case GemmKernel::avx2:
      return cpu::has(cpu::Instructions::avx2);
    case GemmKernel::avx512:
      return cpu::has(cpu::Instructions::avx512);
    case GemmKernel::neon_bf16:
      return cpu::has(cpu::Instructions::neon_bf16);
    case GemmKernel::avx512_bf16:
      return cpu::has(cpu::Instructions::avx512_bf16);
    case GemmKernel::amx:
      return cpu::has(cpu::Instructions::amx);
    default:
      return true;
  }
}

std::string_view gemm_library() {
  const std::string_view blas = cpu::blas_library();
  if (cpu::cblas_first() && !blas.empty()) return blas;
  switch (cpu::best_kernel()) {
    case GemmKernel::neon:
      return "neon";
    case GemmKernel::sve:
      return "sve";
    case GemmKernel::avx2:
      return "avx2";
    case GemmKernel::avx512:
      return "avx512";
    default:
      return blas.empty() ? "own" : blas;
  }
}

}  // namespace stepgraph
