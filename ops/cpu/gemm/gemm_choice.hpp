#pragma once
#include "ops/cpu/gemm/gemm.hpp"

// Which kernel computes a product. The choice is the same in all calls. Internal to ops/cpu/gemm/gemm.cpp.
namespace stepgraph::cpu {

// Whether products of f32 use a CBLAS that was requested by name.
[[nodiscard]] bool cblas_first() noexcept;

// The kernel of ours that this machine runs fastest: for operands of f32, and for bf16.
[[nodiscard]] GemmKernel best_kernel();
[[nodiscard]] GemmKernel best_bf16_kernel();

// The kernel for operands of other types on machines that have `kernel`, a kernel for bf16.
[[nodiscard]] GemmKernel without_bf16(GemmKernel kernel) noexcept;

}  // namespace stepgraph::cpu
