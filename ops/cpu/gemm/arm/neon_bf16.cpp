#include <arm_neon.h>

#include "ops/cpu/gemm/gemm_bf16_blocks.hpp"

// Compiled with -march=armv8.2-a+bf16.
namespace stepgraph::cpu {
namespace {

// BFMMLA multiplies two rows by two columns over 4 steps of k. 24 of 32 registers hold sums, each of 2 rows by 2
// columns; vectors 0 to 3 are the rows of a step, 4 to 7 the columns in turn. Written by hand: compilers would spill.
// The rows come from the second-level cache; without prefetching they would be a few percent slower.
struct NeonBf16 {
  static constexpr int rows = 8, cols = 12, a_group = 4, b_group = 4, step = 4, bytes = 16;
  static constexpr std::int64_t max_rows = 256, max_cols = 384, max_depth = 1024, at_once = 96;
  static void begin() {}
  static void end() {}

  // clang-format off
#define STEPGRAPH_LOAD(to, from, at) "ldr q" #to ", [%[" #from "], #" #at "]\n"
#define STEPGRAPH_ADD(row, col, right) "bfmmla %[s" #row #col "].4s, v" #row ".8h, v" #right ".8h\n"
#define STEPGRAPH_COLUMN(col, right) \
  STEPGRAPH_ADD(0, col, right) STEPGRAPH_ADD(1, col, right) STEPGRAPH_ADD(2, col, right) STEPGRAPH_ADD(3, col, right)
#define STEPGRAPH_ZERO(row)                                                                        \
  "movi %[s" #row "0].4s, #0\n movi %[s" #row "1].4s, #0\n movi %[s" #row "2].4s, #0\n"            \
  "movi %[s" #row "3].4s, #0\n movi %[s" #row "4].4s, #0\n movi %[s" #row "5].4s, #0\n"
#define STEPGRAPH_SUM(row)                                                                         \
  [s##row##0] "=&w"(sum[row][0]), [s##row##1] "=&w"(sum[row][1]), [s##row##2] "=&w"(sum[row][2]),  \
  [s##row##3] "=&w"(sum[row][3]), [s##row##4] "=&w"(sum[row][4]), [s##row##5] "=&w"(sum[row][5])
  static void multiply(const std::uint16_t* a, const std::uint16_t* b, std::int64_t depth, std::int64_t,
                       float* block) {
    float32x4_t sum[4][6];
    asm volatile(STEPGRAPH_ZERO(0) STEPGRAPH_ZERO(1) STEPGRAPH_ZERO(2) STEPGRAPH_ZERO(3)
        ".p2align 5\n 1:\n"
        STEPGRAPH_LOAD(0, a, 0) STEPGRAPH_LOAD(4, b, 0) STEPGRAPH_LOAD(1, a, 16) STEPGRAPH_LOAD(2, a, 32)
        STEPGRAPH_LOAD(3, a, 48) STEPGRAPH_LOAD(5, b, 16)
        STEPGRAPH_COLUMN(0, 4) "prfm pldl1keep, [%[a], #512]\n" STEPGRAPH_LOAD(6, b, 32)
        STEPGRAPH_COLUMN(1, 5) STEPGRAPH_LOAD(7, b, 48)
        STEPGRAPH_COLUMN(2, 6) STEPGRAPH_LOAD(4, b, 64) STEPGRAPH_COLUMN(3, 7) STEPGRAPH_LOAD(5, b, 80)
        "add %[a], %[a], #64\n add %[b], %[b], #96\n subs %[k], %[k], #4\n"
        STEPGRAPH_COLUMN(4, 4) STEPGRAPH_COLUMN(5, 5)
        "b.gt 1b\n"
        : STEPGRAPH_SUM(0), STEPGRAPH_SUM(1), STEPGRAPH_SUM(2), STEPGRAPH_SUM(3),
          [a] "+r"(a), [b] "+r"(b), [k] "+r"(depth)
        :
        : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "memory", "cc");
#undef STEPGRAPH_LOAD
#undef STEPGRAPH_ADD
#undef STEPGRAPH_COLUMN
#undef STEPGRAPH_ZERO
#undef STEPGRAPH_SUM
    // clang-format on
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 3
      for (int j = 0; j < 3; ++j) {
        const float32x4_t left = sum[i][2 * j], right = sum[i][2 * j + 1];
        vst1q_f32(block + 2 * i * cols + 4 * j, vcombine_f32(vget_low_f32(left), vget_low_f32(right)));
        vst1q_f32(block + (2 * i + 1) * cols + 4 * j, vcombine_f32(vget_high_f32(left), vget_high_f32(right)));
      }
    }
  }
};

}  // namespace

template <class Out>
void multiply_neon_bf16(Bf16Room& room, const Bf16Product<Out>& product, const PartDone& done) {
  multiply_bf16<NeonBf16>(room, product, done);
}
template void multiply_neon_bf16(Bf16Room&, const Bf16Product<float>&, const PartDone&);
template void multiply_neon_bf16(Bf16Room&, const Bf16Product<bf16>&, const PartDone&);

}  // namespace stepgraph::cpu
