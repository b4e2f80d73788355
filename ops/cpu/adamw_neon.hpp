#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "ops/shared/optimizer_scalars.hpp"

// AdamW for 64-bit Arm: the operations of the portable loop with the same rounding, in an order that keeps the divider
// busy. On Neoverse V1, the square root and the division of one vector occupy the divider for 6.5 cycles, more than
// everything else together. A loop over single vectors leaves it idle for another 1.8 cycles, waiting for operands.
namespace stepgraph::cpu {

// Loads a vector at this point of the program. fmla overwrites its addend, so it needs a copy. A compiler would copy a
// register, which takes a slot in the divider's pipes; this load takes a slot in the load pipes.
[[gnu::always_inline]] inline float32x4_t read_now(const float (&from)[4]) {
  float32x4_t read;
  asm volatile("ldr %q0, %1" : "=w"(read) : "Q"(from));
  return read;
}

// Updates the first elements, in whole turns of 32, and returns their number.
//
// This is a software pipeline over pairs of vectors with three stages. Each step runs one stage of three different
// pairs: the weights of the oldest pair, the quotients of a pair two steps younger, and the roots of the youngest. The
// operands of a step are therefore ready when it begins. Pairs use four register sets in turn; four steps are one turn.
[[gnu::noinline]] inline std::int64_t adamw_turns(const AdamWFactors<float>& of, float* __restrict weight,
                                                  float* __restrict first, float* __restrict second,
                                                  const float* __restrict gradient, std::int64_t count) {
  constexpr int vectors = 2, places = 4;
  constexpr std::int64_t per_step = 4 * vectors, per_turn = places * per_step;
  constexpr std::int64_t ahead = 128;  // prefetch distance in elements; hardware prefetching is too slow for two cores
  if (count < per_turn) return 0;
  const float32x4_t factor = vdupq_n_f32(of.factor), keep = vdupq_n_f32(of.keep), new1 = vdupq_n_f32(of.new1),
                    beta2 = vdupq_n_f32(of.beta2), new2 = vdupq_n_f32(of.new2), unroot2 = vdupq_n_f32(of.unroot2),
                    minus_size   = vdupq_n_f32(-of.size);
  alignas(16) const float eps[4] = {of.eps, of.eps, of.eps, of.eps};
  float32x4_t m[places][vectors], root[places][vectors], quotient[places][vectors];

  const auto roots = [&](std::int64_t at, int place) __attribute__((always_inline)) {
    float32x4_t v[vectors];
#pragma GCC unroll 2
    for (int k = 0; k < vectors; ++k, at += 4) {
      const float32x4_t g = vmulq_f32(vld1q_f32(gradient + at), factor), before = vld1q_f32(first + at);
      m[place][k] = vfmaq_f32(before, vsubq_f32(g, before), new1);
      v[k]        = vfmaq_f32(vmulq_f32(vld1q_f32(second + at), beta2), vmulq_f32(new2, g), g);
      vst1q_f32(first + at, m[place][k]);
      vst1q_f32(second + at, v[k]);
    }
#pragma GCC unroll 2
    for (int k = 0; k < vectors; ++k) root[place][k] = vsqrtq_f32(v[k]);
  };
  const auto quotients = [&](int place) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int k = 0; k < vectors; ++k) {
      quotient[place][k] = vdivq_f32(m[place][k], vfmaq_f32(read_now(eps), root[place][k], unroot2));
    }
  };
  const auto weights = [&](std::int64_t at, int place) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int k = 0; k < vectors; ++k, at += 4) {
      vst1q_f32(weight + at, vfmaq_f32(vmulq_f32(vld1q_f32(weight + at), keep), minus_size, quotient[place][k]));
    }
  };
  // The first turn has no older pairs. The last turn lies past the end and has no younger pairs.
  const auto turn = [&](std::int64_t at, bool is_first, bool is_last) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int step = 0; step < places; ++step, at += per_step) {
      if (step % 2 == 0) {  // once per cache line
        __builtin_prefetch(gradient + at + ahead);
        __builtin_prefetch(first + at + ahead, 1);
        __builtin_prefetch(second + at + ahead, 1);
        __builtin_prefetch(weight + at + ahead, 1);
      }
      if (!is_first) weights(at - per_turn, step);
      if (is_last ? step < 2 : !is_first || step >= 2) quotients((step + 2) % places);
      if (!is_last) roots(at, step);
      asm volatile("");  // keeps the compiler from mixing the steps
    }
  };
  turn(0, true, false);
  std::int64_t at = per_turn;
  for (; at + per_turn <= count; at += per_turn) turn(at, false, false);
  turn(at, false, true);
  return at;
}

}  // namespace stepgraph::cpu
