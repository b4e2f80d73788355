#pragma once
#include <cstdint>

#include "ops/cpu/matrix.hpp"

// Register blocks of our product for 64-bit Arm with SVE. The file that is compiled for SVE includes nothing beyond
// this header and intrinsics: an inline function compiled for it could replace the one that other processors run.
namespace stepgraph::cpu {

// The number of f32 in a vector of this machine. Only if it has SVE.
[[nodiscard]] std::int64_t sve_lanes() noexcept;

// One register block of 8 rows by 2 or 3 vectors over one block of k. Its first `rows` rows and `cols` columns exist;
// `cols` may be more than it has. a is packed in panels of 8 rows, b in panels of that many vectors. Each step of k is
// one fused multiply-add, so the bits of an element do not depend on the length of vectors.
template <int vectors>
void multiply_sve_block(const float* a, const float* b, std::int64_t depth, const PanelOut& to, std::int64_t rows,
                        std::int64_t cols);

// The register blocks of ops/cpu/gemm/arm/panels.hpp, for vectors of `of` f32. The depth is the same for all
// lengths, so that they give the same bits. A panel of 3 vectors is 12, 24 or 48 KiB.
template <std::int64_t of>
struct SveKernel {
  static constexpr std::int64_t lanes = of, max_depth = 256;
  template <int vectors>
  static void multiply(const float* a, const float* b, std::int64_t depth, const PanelOut& to, std::int64_t rows,
                       std::int64_t cols) {
    multiply_sve_block<vectors>(a, b, depth, to, rows, cols);
  }
};

}  // namespace stepgraph::cpu
