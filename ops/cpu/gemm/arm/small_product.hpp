#pragma once
#include <cstdint>

// Blocks of 8 rows by 8 columns of ops/cpu/gemm/small_product.hpp for 64-bit Arm, in f32. Written by hand for the order of
// instructions: loads for the next step and additions to pointers stand in pairs between multiplications. Where
// compilers put them, products are up to a tenth slower.
namespace stepgraph::cpu {

// clang-format off
#define STEPGRAPH_ADD(row, left, r0, r1)                                                                     \
  "fmla %[s" #row "0].4s, v" #r0 ".4s, v" left "\n fmla %[s" #row "1].4s, v" #r1 ".4s, v" left "\n"
#define STEPGRAPH_ZERO(row) "movi %[s" #row "0].4s, #0\n movi %[s" #row "1].4s, #0\n"
#define STEPGRAPH_SUM(row) [s##row##0] "=&w"(sums[row][0]), [s##row##1] "=&w"(sums[row][1])
#define STEPGRAPH_ZEROS                                                                                      \
  STEPGRAPH_ZERO(0) STEPGRAPH_ZERO(1) STEPGRAPH_ZERO(2) STEPGRAPH_ZERO(3)                                    \
  STEPGRAPH_ZERO(4) STEPGRAPH_ZERO(5) STEPGRAPH_ZERO(6) STEPGRAPH_ZERO(7)
#define STEPGRAPH_SUMS                                                                                       \
  STEPGRAPH_SUM(0), STEPGRAPH_SUM(1), STEPGRAPH_SUM(2), STEPGRAPH_SUM(3),                                    \
  STEPGRAPH_SUM(4), STEPGRAPH_SUM(5), STEPGRAPH_SUM(6), STEPGRAPH_SUM(7)
// The next row of b, or the next step of a.
#define STEPGRAPH_NEXT(of, n0, n1) "ldp q" #n0 ", q" #n1 ", [%[" #of "]]\n add %[" #of "], %[" #of "], %[" #of "_row]\n"

// Element (r, k) of the left operand is a[k * a_row + r]; depth is a multiple of 2. Vectors 0 to 3 are two steps of it
// in turn, vectors 4 to 7 two rows of b. The last two steps load nothing that comes after them.
#define STEPGRAPH_STEP(a0, a1, b0, b1, next_a, next_b)                                                       \
  next_a STEPGRAPH_ADD(0, a0 ".s[0]", b0, b1) next_b STEPGRAPH_ADD(1, a0 ".s[1]", b0, b1)                    \
  STEPGRAPH_ADD(2, a0 ".s[2]", b0, b1) STEPGRAPH_ADD(3, a0 ".s[3]", b0, b1)                                  \
  STEPGRAPH_ADD(4, a1 ".s[0]", b0, b1) STEPGRAPH_ADD(5, a1 ".s[1]", b0, b1)                                  \
  STEPGRAPH_ADD(6, a1 ".s[2]", b0, b1) STEPGRAPH_ADD(7, a1 ".s[3]", b0, b1)
template <class Vector>  // of 4 floats
[[gnu::always_inline]] inline void sum_columns(const float* a, std::int64_t a_row, const float* b, std::int64_t b_row,
                                               std::int64_t depth, Vector (&sums)[8][2]) {
  asm volatile(STEPGRAPH_ZEROS
      STEPGRAPH_NEXT(a, 0, 1) STEPGRAPH_NEXT(b, 4, 5)
      "subs %[k], %[k], #2\n b.le 2f\n .p2align 5\n 1:\n"
      STEPGRAPH_STEP("0", "1", 4, 5, STEPGRAPH_NEXT(a, 2, 3), STEPGRAPH_NEXT(b, 6, 7))
      STEPGRAPH_STEP("2", "3", 6, 7, STEPGRAPH_NEXT(a, 0, 1), STEPGRAPH_NEXT(b, 4, 5))
      "subs %[k], %[k], #2\n b.gt 1b\n 2:\n"
      STEPGRAPH_STEP("0", "1", 4, 5, STEPGRAPH_NEXT(a, 2, 3), STEPGRAPH_NEXT(b, 6, 7))
      STEPGRAPH_STEP("2", "3", 6, 7, "", "")
      : STEPGRAPH_SUMS, [a] "+r"(a), [b] "+r"(b), [k] "+r"(depth)
      : [a_row] "r"(4 * a_row), [b_row] "r"(4 * b_row)
      : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "memory", "cc");
}
#undef STEPGRAPH_STEP

// Element (r, k) of the left operand is a[r * a_row + k]; depth is a multiple of 4. Vectors 0 to 7 are four steps of a
// row each, vectors 8 to 11 two rows of b in turn. The last four steps load nothing that comes after them.
#define STEPGRAPH_LOAD_01 "ldr q0, [%[a]]\n ldr q1, [%[a], %[at1]]\n"
#define STEPGRAPH_LOAD(r0, r1) "ldr q" #r0 ", [%[a], %[at" #r0 "]]\n ldr q" #r1 ", [%[a], %[at" #r1 "]]\n"
#define STEPGRAPH_TWO(r0, r1, step, b0, b1)                                                                  \
  STEPGRAPH_ADD(r0, #r0 ".s[" #step "]", b0, b1) STEPGRAPH_ADD(r1, #r1 ".s[" #step "]", b0, b1)
#define STEPGRAPH_STEP(step, b0, b1, next_b)                                                                 \
  STEPGRAPH_TWO(0, 1, step, b0, b1) STEPGRAPH_TWO(2, 3, step, b0, b1) next_b                                 \
  STEPGRAPH_TWO(4, 5, step, b0, b1) STEPGRAPH_TWO(6, 7, step, b0, b1)
template <class Vector>  // of 4 floats
[[gnu::always_inline]] inline void sum_rows(const float* a, std::int64_t a_row, const float* b, std::int64_t b_row,
                                            std::int64_t depth, Vector (&sums)[8][2]) {
  const std::int64_t next = 4 * a_row;
  asm volatile(STEPGRAPH_ZEROS
      STEPGRAPH_LOAD_01 STEPGRAPH_LOAD(2, 3) STEPGRAPH_LOAD(4, 5) STEPGRAPH_LOAD(6, 7) STEPGRAPH_NEXT(b, 8, 9)
      "subs %[k], %[k], #4\n b.le 2f\n .p2align 5\n 1:\n"
      STEPGRAPH_STEP(0, 8, 9, STEPGRAPH_NEXT(b, 10, 11))
      STEPGRAPH_STEP(1, 10, 11, STEPGRAPH_NEXT(b, 8, 9))
      STEPGRAPH_STEP(2, 8, 9, STEPGRAPH_NEXT(b, 10, 11))
      "add %[a], %[a], #16\n subs %[k], %[k], #4\n"
      STEPGRAPH_TWO(0, 1, 3, 10, 11) STEPGRAPH_LOAD_01
      STEPGRAPH_TWO(2, 3, 3, 10, 11) STEPGRAPH_NEXT(b, 8, 9) STEPGRAPH_LOAD(2, 3)
      STEPGRAPH_TWO(4, 5, 3, 10, 11) STEPGRAPH_LOAD(4, 5)
      STEPGRAPH_TWO(6, 7, 3, 10, 11) STEPGRAPH_LOAD(6, 7)
      "b.gt 1b\n 2:\n"
      STEPGRAPH_STEP(0, 8, 9, STEPGRAPH_NEXT(b, 10, 11))
      STEPGRAPH_STEP(1, 10, 11, STEPGRAPH_NEXT(b, 8, 9))
      STEPGRAPH_STEP(2, 8, 9, STEPGRAPH_NEXT(b, 10, 11))
      STEPGRAPH_STEP(3, 10, 11, "")
      : STEPGRAPH_SUMS, [a] "+r"(a), [b] "+r"(b), [k] "+r"(depth)
      : [b_row] "r"(4 * b_row), [at1] "r"(next), [at2] "r"(2 * next), [at3] "r"(3 * next), [at4] "r"(4 * next),
        [at5] "r"(5 * next), [at6] "r"(6 * next), [at7] "r"(7 * next)
      : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "memory", "cc");
}
#undef STEPGRAPH_STEP
#undef STEPGRAPH_TWO
#undef STEPGRAPH_LOAD
#undef STEPGRAPH_LOAD_01
#undef STEPGRAPH_NEXT
#undef STEPGRAPH_SUMS
#undef STEPGRAPH_ZEROS
#undef STEPGRAPH_SUM
#undef STEPGRAPH_ZERO
#undef STEPGRAPH_ADD
// clang-format on

}  // namespace stepgraph::cpu
