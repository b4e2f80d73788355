#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "ops/cpu/gemm/gemm.hpp"

// Packs operands of the products for Arm into panels of `width` lanes, k by k, widened, so that their kernels read
// contiguously. The depth is padded with zeros to a multiple of 4, and so are the unused lanes of the last panel.
namespace stepgraph::cpu {

[[nodiscard]] inline std::int64_t padded_depth(std::int64_t depth) { return (depth + 3) / 4 * 4; }

[[nodiscard]] inline float32x4_t load_four(const float* from) { return vld1q_f32(from); }
[[nodiscard]] inline float32x4_t load_four(const bf16* from) {  // bf16 is the upper half of a float
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(from)), 16));
}
[[nodiscard]] inline float32x4_t load_four(const f16* from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(from))));
}

// Prefetches the address `elements` away. Uses integers, because a pointer beyond the end of an array is undefined.
template <int level, class T>
[[gnu::always_inline]] inline void prefetch_ahead(const T* from, std::int64_t elements) {
  const auto bytes = static_cast<std::uintptr_t>(elements) * sizeof(T);  // modulo 2^64, like addresses
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) + bytes), 0, level);
}

// Packs one panel element by element: the remainder of the functions below.
template <std::int64_t width, class T>
void pack_some(const T* from, std::int64_t across, std::int64_t along, std::int64_t used, std::int64_t first,
               std::int64_t depth, float* to) {
  for (std::int64_t p = first; p < padded_depth(depth); ++p) {
    for (std::int64_t i = 0; i < width; ++i)
      to[p * width + i] = i < used && p < depth ? wide(from[i * across + p * along]) : 0.0F;
  }
}

// Packs adjacent panels of an operand whose lanes are contiguous in memory. Takes 4 steps of k at a time for all
// panels: output lines are then complete when they leave the cache, and at most 4 rows, which may map to the same cache
// sets, are read at a time.
template <std::int64_t width, class T>
void pack_copied(const T* from, std::int64_t along, std::int64_t panels, std::int64_t depth, float* to,
                 std::int64_t panel_size) {
  std::int64_t p = 0;
  for (; p + 4 <= depth; p += 4) {
    for (std::int64_t panel = 0; panel < panels; ++panel) {
#pragma GCC unroll 4
      for (std::int64_t q = 0; q < 4; ++q) {
        const T* const row = from + (p + q) * along + panel * width;
        float* const at    = to + panel * panel_size + (p + q) * width;
        prefetch_ahead<2>(row, 16 * along);
#pragma GCC unroll 3
        for (std::int64_t i = 0; i < width; i += 4) vst1q_f32(at + i, load_four(row + i));
      }
    }
  }
  for (std::int64_t panel = 0; panel < panels && p < depth; ++panel)
    pack_some<width>(from + panel * width, 1, along, width, p, depth, to + panel * panel_size);
}

inline void store_transposed(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float* to,
                             std::int64_t stride) {
  const float32x4_t ac0 = vzip1q_f32(a, c), ac1 = vzip2q_f32(a, c), bd0 = vzip1q_f32(b, d), bd1 = vzip2q_f32(b, d);
  vst1q_f32(to, vzip1q_f32(ac0, bd0));
  vst1q_f32(to + stride, vzip2q_f32(ac0, bd0));
  vst1q_f32(to + 2 * stride, vzip1q_f32(ac1, bd1));
  vst1q_f32(to + 3 * stride, vzip2q_f32(ac1, bd1));
}

// Packs one panel of an operand whose steps of k are contiguous: one cache line of each of 4 lanes at a time.
template <std::int64_t width, class T>
void pack_transposed(const T* from, std::int64_t across, std::int64_t depth, float* to) {
  std::int64_t p        = 0;
  const auto four_steps = [&](std::int64_t lane, std::int64_t step) {
    const T* const at = from + lane * across + step;
    store_transposed(load_four(at), load_four(at + across), load_four(at + 2 * across), load_four(at + 3 * across),
                     to + step * width + lane, width);
  };
  for (; p + 16 <= depth; p += 16) {
    for (std::int64_t lane = 0; lane < width; lane += 4) {
      for (std::int64_t i = 0; i < 4; ++i) prefetch_ahead<3>(from + (lane + i) * across + p, 64);
#pragma GCC unroll 4
      for (std::int64_t q = 0; q < 16; q += 4) four_steps(lane, p + q);
    }
  }
  for (; p + 4 <= depth; p += 4) {
    for (std::int64_t lane = 0; lane < width; lane += 4) four_steps(lane, p);
  }
  pack_some<width>(from, across, 1, width, p, depth, to);
}

// Packs `lanes` lanes into as many panels as needed, panel_size apart.
template <std::int64_t width, class T>
void pack_panels(const T* from, std::int64_t across, std::int64_t along, std::int64_t lanes, std::int64_t depth,
                 float* to, std::int64_t panel_size) {
  const std::int64_t whole = lanes / width;
  if (across == 1) {
    pack_copied<width>(from, along, whole, depth, to, panel_size);
  } else {
    for (std::int64_t panel = 0; panel < whole; ++panel) {
      const T* const at = from + panel * width * across;
      if (along == 1) {
        pack_transposed<width>(at, across, depth, to + panel * panel_size);
      } else {
        pack_some<width>(at, across, along, width, 0, depth, to + panel * panel_size);
      }
    }
  }
  if (whole * width < lanes) {
    pack_some<width>(from + whole * width * across, across, along, lanes - whole * width, 0, depth,
                     to + whole * panel_size);
  }
}

}  // namespace stepgraph::cpu
