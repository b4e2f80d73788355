#pragma once
#include <type_traits>

#include "ops/cpu/gemm/x86/pack.hpp"

// Packing with AVX-512, as in ops/cpu/gemm/x86/pack.hpp: whole lines of 16 floats are read and written, so a line
// comes into the first-level cache once, however far apart the rows are.
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own headers: its bug 105593
#endif
namespace stepgraph::cpu {
namespace {

inline __m512 load_sixteen(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load_sixteen(const bf16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline __m512 load_sixteen(const f16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

struct FourVectors {
  __m512 at[4];
};

// 16 steps of k of four lanes: quarter q of at[j] is step 4 q + j.
template <class T>
inline FourVectors steps_of_four(const T* from, std::int64_t across) {
  const __m512 a = load_sixteen(from), b = load_sixteen(from + across), c = load_sixteen(from + 2 * across),
               d    = load_sixteen(from + 3 * across);
  const __m512d ab0 = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab1 = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)),
                cd0 = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd1 = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
  return {{_mm512_castpd_ps(_mm512_unpacklo_pd(ab0, cd0)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab0, cd0)),
           _mm512_castpd_ps(_mm512_unpacklo_pd(ab1, cd1)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab1, cd1))}};
}
// at[q] has quarter q of a, b, c and d.
inline FourVectors quarters_of_four(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab0 = _mm512_shuffle_f32x4(a, b, 0x44), ab1 = _mm512_shuffle_f32x4(a, b, 0xee),
               cd0 = _mm512_shuffle_f32x4(c, d, 0x44), cd1 = _mm512_shuffle_f32x4(c, d, 0xee);
  return {{_mm512_shuffle_f32x4(ab0, cd0, 0x88), _mm512_shuffle_f32x4(ab0, cd0, 0xdd),
           _mm512_shuffle_f32x4(ab1, cd1, 0x88), _mm512_shuffle_f32x4(ab1, cd1, 0xdd)}};
}

// 16 steps of k of 16 lanes; steps are `width` elements apart.
template <int width, class T>
inline void pack_sixteen(const T* from, std::int64_t across, float* to) {
  FourVectors lanes[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) lanes[i] = steps_of_four(from + 4 * i * across, across);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const FourVectors steps = quarters_of_four(lanes[0].at[j], lanes[1].at[j], lanes[2].at[j], lanes[3].at[j]);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) _mm512_storeu_ps(to + (4 * q + j) * width, steps.at[q]);
  }
}

// 16 steps of k of 12 lanes, without gaps: the four steps of a quarter are 12 groups of four lanes, three vectors.
template <class T>
inline void pack_twelve(const T* from, std::int64_t across, float* to) {
  FourVectors lanes[3];
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) lanes[i] = steps_of_four(from + 4 * i * across, across);
  const auto group = [&](int i) __attribute__((always_inline)) { return lanes[i % 3].at[i / 3]; };
#pragma GCC unroll 3
  for (int third = 0; third < 3; ++third) {
    const FourVectors quarters =
        quarters_of_four(group(4 * third), group(4 * third + 1), group(4 * third + 2), group(4 * third + 3));
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) _mm512_storeu_ps(to + (3 * q + third) * 16, quarters.at[q]);
  }
}

// Four steps of k of 12 contiguous lanes: three vectors, each of parts of two steps.
inline void pack_four_steps(const float* from, std::int64_t along, float* to) {
  const auto two = [](__mmask16 first, const float* a, const float* b) __attribute__((always_inline)) {
    return _mm512_mask_loadu_ps(_mm512_maskz_loadu_ps(first, a), static_cast<__mmask16>(~first), b);
  };
  const float *const b = from + along, *const c = b + along, *const d = c + along;
  _mm512_storeu_ps(to, two(0x0fff, from, b - 12));
  _mm512_storeu_ps(to + 16, two(0x00ff, b + 4, c - 8));
  _mm512_storeu_ps(to + 32, two(0x000f, c + 8, d - 4));
}

// Packs whole panels by whole lines of 16 floats.
struct PackLines {
  // Adjacent panels of an operand whose lanes are contiguous in memory.
  template <int width, class T>
  static void copied(const T* from, std::int64_t along, std::int64_t panels, std::int64_t depth, float* to) {
    // Of many panels at a time, lines that map to the same set of a cache would evict each other.
    constexpr std::int64_t panels_at_a_time = 4;
    for (std::int64_t first = 0; first < panels; first += panels_at_a_time) {
      const std::int64_t end = least(first + panels_at_a_time, panels);
      std::int64_t p         = 0;
      if constexpr (width == 12 && std::is_same_v<T, float>) {
        for (; p + 4 <= depth; p += 4) {
          for (std::int64_t panel = first; panel < end; ++panel)
            pack_four_steps(from + p * along + panel * width, along, to + (panel * depth + p) * width);
        }
      }
      for (; p < depth; ++p) {
        for (std::int64_t panel = first; panel < end; ++panel) {
          const T* const row = from + p * along + panel * width;
          float* const at    = to + (panel * depth + p) * width;
          int i              = 0;
          for (; i + 16 <= width; i += 16) _mm512_storeu_ps(at + i, load_sixteen(row + i));
          copy_lanes<width>(row, i, at);
        }
      }
    }
  }

  // One panel of an operand whose steps of k are contiguous.
  template <int width, class T>
  static void transposed(const T* from, std::int64_t across, std::int64_t depth, float* to) {
    static_assert(width == 12 || width % 16 == 0);
    std::int64_t p = 0;
    for (; p + 16 <= depth; p += 16) {
      if constexpr (width == 12) {
        pack_twelve(from + p, across, to + p * width);
      } else {
#pragma GCC unroll 2
        for (int lane = 0; lane < width; lane += 16)
          pack_sixteen<width>(from + lane * across + p, across, to + p * width + lane);
      }
    }
    pack_some<width>(from, across, 1, width, p, depth, to);
  }
};

}  // namespace
}  // namespace stepgraph::cpu
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
