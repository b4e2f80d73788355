#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "ops/cpu/gemm/arm/panels.hpp"

// Our product for every 64-bit Arm. Sums of 8 rows by 12 (or 8) columns stay in registers.
namespace stepgraph::cpu {

// sum = a b over one block of k, a positive multiple of 4. Written by hand: all 32 vector registers are in use, and
// compilers would spill. Vectors 0 and 1 are 8 lanes of the left panel; vectors 2 to 4 and 5 to 7, in turn, hold the
// right panel. Loads for the next step stand singly between multiplications, about every fifth instruction: in pairs,
// or all at the beginning of a step, they would stall the multiplications. Reads up to 48 bytes beyond the end of a
// panel.
// clang-format off
#define STEPGRAPH_LOAD(to, from, at) "ldr q" #to ", [%[" #from "], #" #at "]\n"
#define STEPGRAPH_AHEAD(at) "prfm pldl1keep, [%[a], #" #at "]\n"
#define STEPGRAPH_ADD(row, col, left, right) "fmla %[s" #row #col "].4s, v" #right ".4s, v" left "\n"
#define STEPGRAPH_ROW_2(row, left, r0, r1) STEPGRAPH_ADD(row, 0, left, r0) STEPGRAPH_ADD(row, 1, left, r1)
// One step of k: multiplies by r*, loads n* from n*_at and the left lanes from a*_at. Blocks of 8 columns consume lines
// of the left panel faster than the hardware prefetches them, so they are prefetched here.
#define STEPGRAPH_STEP_2(r0, r1, n0, n1, a1_at, a0_at, n0_at, n1_at, ahead)                      \
  STEPGRAPH_ROW_2(0, "0.s[0]", r0, r1) STEPGRAPH_LOAD(1, a, a1_at)                               \
  STEPGRAPH_ROW_2(1, "0.s[1]", r0, r1)                                                           \
  STEPGRAPH_ROW_2(2, "0.s[2]", r0, r1) STEPGRAPH_LOAD(n0, b, n0_at)                              \
  STEPGRAPH_ROW_2(3, "0.s[3]", r0, r1)                                                           \
  STEPGRAPH_ROW_2(4, "1.s[0]", r0, r1) STEPGRAPH_LOAD(0, a, a0_at)                               \
  STEPGRAPH_ROW_2(5, "1.s[1]", r0, r1) ahead                                                     \
  STEPGRAPH_ROW_2(6, "1.s[2]", r0, r1) STEPGRAPH_LOAD(n1, b, n1_at)                              \
  STEPGRAPH_ROW_2(7, "1.s[3]", r0, r1)
#define STEPGRAPH_STEP_3(r0, r1, r2, n0, n1, n2, a1_at, a0_at, n0_at, n1_at, n2_at)              \
  STEPGRAPH_ADD(0, 0, "0.s[0]", r0) STEPGRAPH_ADD(1, 0, "0.s[1]", r0) STEPGRAPH_LOAD(1, a, a1_at)  \
  STEPGRAPH_ADD(2, 0, "0.s[2]", r0) STEPGRAPH_ADD(3, 0, "0.s[3]", r0)                              \
  STEPGRAPH_ADD(0, 1, "0.s[0]", r1) STEPGRAPH_ADD(1, 1, "0.s[1]", r1)                              \
  STEPGRAPH_ADD(2, 1, "0.s[2]", r1) STEPGRAPH_LOAD(n0, b, n0_at) STEPGRAPH_ADD(3, 1, "0.s[3]", r1) \
  STEPGRAPH_ADD(0, 2, "0.s[0]", r2) STEPGRAPH_ADD(1, 2, "0.s[1]", r2)                              \
  STEPGRAPH_ADD(2, 2, "0.s[2]", r2) STEPGRAPH_ADD(3, 2, "0.s[3]", r2) STEPGRAPH_LOAD(0, a, a0_at)  \
  STEPGRAPH_ADD(4, 0, "1.s[0]", r0) STEPGRAPH_ADD(5, 0, "1.s[1]", r0)                              \
  STEPGRAPH_ADD(6, 0, "1.s[2]", r0) STEPGRAPH_ADD(7, 0, "1.s[3]", r0)                              \
  STEPGRAPH_ADD(4, 1, "1.s[0]", r1) STEPGRAPH_LOAD(n1, b, n1_at) STEPGRAPH_ADD(5, 1, "1.s[1]", r1) \
  STEPGRAPH_ADD(6, 1, "1.s[2]", r1) STEPGRAPH_ADD(7, 1, "1.s[3]", r1)                              \
  STEPGRAPH_ADD(4, 2, "1.s[0]", r2) STEPGRAPH_ADD(5, 2, "1.s[1]", r2) STEPGRAPH_LOAD(n2, b, n2_at) \
  STEPGRAPH_ADD(6, 2, "1.s[2]", r2) STEPGRAPH_ADD(7, 2, "1.s[3]", r2)
#define STEPGRAPH_ZERO_2(row) "movi %[s" #row "0].4s, #0\n movi %[s" #row "1].4s, #0\n"
#define STEPGRAPH_ZERO_3(row) STEPGRAPH_ZERO_2(row) "movi %[s" #row "2].4s, #0\n"
#define STEPGRAPH_SUM_2(row) [s##row##0] "=&w"(sum[row][0]), [s##row##1] "=&w"(sum[row][1])
#define STEPGRAPH_SUM_3(row) STEPGRAPH_SUM_2(row), [s##row##2] "=&w"(sum[row][2])
#define STEPGRAPH_ZEROS(ZERO) ZERO(0) ZERO(1) ZERO(2) ZERO(3) ZERO(4) ZERO(5) ZERO(6) ZERO(7)
#define STEPGRAPH_SUMS(SUM) SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5), SUM(6), SUM(7)

inline void sum_panels(const float* a, const float* b, std::int64_t depth, float32x4_t (&sum)[arm_rows][2]) {
  asm volatile(STEPGRAPH_ZEROS(STEPGRAPH_ZERO_2)
      STEPGRAPH_LOAD(0, a, 0) STEPGRAPH_LOAD(2, b, 0) STEPGRAPH_LOAD(3, b, 16)
      ".p2align 5\n 1:\n"
      STEPGRAPH_STEP_2(2, 3, 5, 6, 16, 32, 32, 48, STEPGRAPH_AHEAD(512))
      STEPGRAPH_STEP_2(5, 6, 2, 3, 48, 64, 64, 80, )
      STEPGRAPH_STEP_2(2, 3, 5, 6, 80, 96, 96, 112, STEPGRAPH_AHEAD(576))
      STEPGRAPH_STEP_2(5, 6, 2, 3, 112, 128, 128, 144, )
      "add %[a], %[a], #128\n add %[b], %[b], #128\n subs %[k], %[k], #4\n b.gt 1b\n"
      : STEPGRAPH_SUMS(STEPGRAPH_SUM_2), [a] "+r"(a), [b] "+r"(b), [k] "+r"(depth)
      :
      : "v0", "v1", "v2", "v3", "v5", "v6", "memory", "cc");
}
inline void sum_panels(const float* a, const float* b, std::int64_t depth, float32x4_t (&sum)[arm_rows][3]) {
  asm volatile(STEPGRAPH_ZEROS(STEPGRAPH_ZERO_3)
      STEPGRAPH_LOAD(0, a, 0) STEPGRAPH_LOAD(2, b, 0) STEPGRAPH_LOAD(3, b, 16) STEPGRAPH_LOAD(4, b, 32)
      ".p2align 5\n 1:\n"
      STEPGRAPH_STEP_3(2, 3, 4, 5, 6, 7, 16, 32, 48, 64, 80)
      STEPGRAPH_STEP_3(5, 6, 7, 2, 3, 4, 48, 64, 96, 112, 128)
      STEPGRAPH_STEP_3(2, 3, 4, 5, 6, 7, 80, 96, 144, 160, 176)
      STEPGRAPH_STEP_3(5, 6, 7, 2, 3, 4, 112, 128, 192, 208, 224)
      "add %[a], %[a], #128\n add %[b], %[b], #192\n subs %[k], %[k], #4\n b.gt 1b\n"
      : STEPGRAPH_SUMS(STEPGRAPH_SUM_3), [a] "+r"(a), [b] "+r"(b), [k] "+r"(depth)
      :
      : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "memory", "cc");
}
#undef STEPGRAPH_LOAD
#undef STEPGRAPH_AHEAD
#undef STEPGRAPH_ADD
#undef STEPGRAPH_ROW_2
#undef STEPGRAPH_STEP_2
#undef STEPGRAPH_STEP_3
#undef STEPGRAPH_ZERO_2
#undef STEPGRAPH_ZERO_3
#undef STEPGRAPH_SUM_2
#undef STEPGRAPH_SUM_3
#undef STEPGRAPH_ZEROS
#undef STEPGRAPH_SUMS
// clang-format on

// One register block over one block of k, a positive multiple of 4.
template <int vectors>
[[gnu::noinline]] void multiply_panels(const float* a, const float* b, std::int64_t depth, const PanelOut& to) {
  // Copies, because the compiler cannot exclude that stores modify `to`.
  const auto [out, base, stride, bias, times] = to;
  float32x4_t sum[arm_rows][vectors];
  for (std::int64_t i = 0; i < arm_rows; ++i) {
    __builtin_prefetch(out + i * stride, 1);
    __builtin_prefetch(out + i * stride + 4 * vectors - 1, 1);
    if (times == nullptr) continue;
    __builtin_prefetch(times + i * stride);
    __builtin_prefetch(times + i * stride + 4 * vectors - 1);
  }
  sum_panels(a, b, depth, sum);
  if (base != nullptr) {
    const float* row = base;
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < arm_rows; ++i, row += stride) {
#pragma GCC unroll 3
      for (std::int64_t j = 0; j < vectors; ++j) sum[i][j] = vaddq_f32(vld1q_f32(row + 4 * j), sum[i][j]);
    }
  }
  if (bias != nullptr) {
#pragma GCC unroll 3
    for (std::int64_t j = 0; j < vectors; ++j) {
      const float32x4_t of_columns = vld1q_f32(bias + 4 * j);
#pragma GCC unroll 8
      for (std::int64_t i = 0; i < arm_rows; ++i) sum[i][j] = vaddq_f32(sum[i][j], of_columns);
    }
  }
  if (times != nullptr) {
    const float* row = times;
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < arm_rows; ++i, row += stride) {
#pragma GCC unroll 3
      for (std::int64_t j = 0; j < vectors; ++j) sum[i][j] = vmulq_f32(sum[i][j], vld1q_f32(row + 4 * j));
    }
  }
  float* row = out;
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < arm_rows; ++i, row += stride) {
#pragma GCC unroll 3
    for (std::int64_t j = 0; j < vectors; ++j) vst1q_f32(row + 4 * j, sum[i][j]);
  }
}

// The same if only some rows and columns of the block exist. Each element gets the same operations.
template <int vectors>
[[gnu::noinline]] void multiply_some(const float* a, const float* b, std::int64_t depth, const PanelOut& to,
                                     std::int64_t rows, std::int64_t cols) {
  float sums[arm_rows * 4 * vectors];
  multiply_panels<vectors>(a, b, depth, {sums, nullptr, 4 * vectors, nullptr, nullptr});
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      const std::int64_t at = i * to.stride + j;
      float value           = sums[i * 4 * vectors + j];
      if (to.base != nullptr) value = to.base[at] + value;
      if (to.bias != nullptr) value = value + to.bias[j];
      to.out[at] = to.times != nullptr ? value * to.times[at] : value;
    }
  }
}

// The register blocks of ops/cpu/gemm/arm/panels.hpp. A panel of 12 columns is 24 KiB.
struct NeonKernel {
  static constexpr std::int64_t lanes = 4, max_depth = 512;
  template <int vectors>
  static void multiply(const float* a, const float* b, std::int64_t depth, const PanelOut& to, std::int64_t rows,
                       std::int64_t cols) {
    if (rows == arm_rows && cols >= lanes * vectors) {
      multiply_panels<vectors>(a, b, padded_depth(depth), to);
    } else {
      multiply_some<vectors>(a, b, padded_depth(depth), to, rows, std::min(cols, lanes * vectors));
    }
  }
};

}  // namespace stepgraph::cpu
