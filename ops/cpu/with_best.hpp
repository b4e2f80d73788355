#pragma once
#include <cstdint>

#include "ops/cpu/instructions.hpp"
#include "ops/cpu/level.hpp"

// Loops that the compiler vectorises are compiled for each kind of instructions of x86-64. Which of them runs is chosen
// when the program runs. The choice is the same for all calls, so an element's bits do not depend on the thread.
namespace stepgraph::cpu {

#if defined(__x86_64__)
namespace chosen {
// `body` and all that it calls are inlined here and so compiled for these instructions, except functions of other files
// and those marked noinline. The functions below are not inlined themselves: a caller that is compiled for the same
// instructions (STEPGRAPH_MARCH) can lack `prefer-vector-width=512`, and would get narrower vectors.
template <class Body>
[[gnu::target(STEPGRAPH_TARGET_AVX2), gnu::flatten, gnu::noinline]] void run_avx2(const Body& body) {
  body();
}
template <class Body>
[[gnu::target(STEPGRAPH_TARGET_AVX512), gnu::flatten, gnu::noinline]] void run_avx512(const Body& body) {
  body();
}
template <class Body, class A, class B>
[[gnu::target(STEPGRAPH_TARGET_AVX2), gnu::flatten, gnu::noinline]] void run_avx2(const Body& body, A* __restrict a,
                                                                                  std::int64_t count, B* __restrict b) {
  body(a, count, b);
}
template <class Body, class A, class B>
[[gnu::target(STEPGRAPH_TARGET_AVX512), gnu::flatten, gnu::noinline]] void run_avx512(const Body& body, A* __restrict a,
                                                                                      std::int64_t count,
                                                                                      B* __restrict b) {
  body(a, count, b);
}
}  // namespace chosen
#endif

// Calls body() with the best instructions.
template <class Body>
[[gnu::always_inline]] inline void with_best(const Body& body) {
#if defined(__x86_64__)
  const Instructions best = best_instructions();
  if (best == Instructions::avx512) return chosen::run_avx512(body);
  if (best == Instructions::avx2) return chosen::run_avx2(body);
#endif
  body();
}

// Calls body(a, count, b) with them. `body` is a lambda: a pointer to a function would not be inlined. The arrays do
// not overlap, and the compiler knows it; an array that a lambda captures has lost its `__restrict`.
template <class A, class B, class Body>
[[gnu::always_inline]] inline void with_best(A* __restrict a, std::int64_t count, B* __restrict b, const Body& body) {
#if defined(__x86_64__)
  const Instructions best = best_instructions();
  if (best == Instructions::avx512) return chosen::run_avx512(body, a, count, b);
  if (best == Instructions::avx2) return chosen::run_avx2(body, a, count, b);
#endif
  body(a, count, b);
}

}  // namespace stepgraph::cpu
