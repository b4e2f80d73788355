#pragma once
#include <immintrin.h>

#include <cstdint>

#include "ops/cpu/gemm/x86/x86.hpp"

// How operands of the product of ops/cpu/gemm/x86/x86.hpp are packed: panels of `width` lanes, which are rows of a or
// columns of b, with the lanes of each step of k side by side. Everything is in an anonymous namespace, because each
// file that includes this header compiles it for other instructions.
namespace stepgraph::cpu {
namespace {

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(std::uint32_t{value.bits()} << 16))));
}
inline float widen(f16 value) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(value.bits()))); }

inline __m256 load_eight(const float* from) { return _mm256_loadu_ps(from); }
inline __m256 load_eight(const bf16* from) {  // bf16 is the upper half of a float
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline __m256 load_eight(const f16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline __m128 load_four(const float* from) { return _mm_loadu_ps(from); }
inline __m128 load_four(const bf16* from) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16));
}
inline __m128 load_four(const f16* from) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

// Steps [first, depth) of k for lanes [0, used) of a panel. The other lanes become zero.
template <int width, class T>
void pack_some(const T* from, std::int64_t across, std::int64_t along, std::int64_t used, std::int64_t first,
               std::int64_t depth, float* to) {
  for (std::int64_t p = first; p < depth; ++p) {
    for (std::int64_t i = 0; i < width; ++i) to[p * width + i] = i < used ? widen(from[i * across + p * along]) : 0.0F;
  }
}

// Lanes [first, width) of one step of k, which are contiguous in memory.
template <int width, class T>
inline void copy_lanes(const T* from, int first, float* to) {
  int i = first;
  for (; i + 8 <= width; i += 8) _mm256_storeu_ps(to + i, load_eight(from + i));
  for (; i + 4 <= width; i += 4) _mm_storeu_ps(to + i, load_four(from + i));
  for (; i < width; ++i) to[i] = widen(from[i]);
}

// 8 steps of k of 4 lanes, or of 2.
template <int width, class T>
inline void pack_four(const T* from, std::int64_t across, float* to) {
  const __m256 a = load_eight(from), b = load_eight(from + across), c = load_eight(from + 2 * across),
               d   = load_eight(from + 3 * across);
  const __m256 ab0 = _mm256_unpacklo_ps(a, b), ab1 = _mm256_unpackhi_ps(a, b), cd0 = _mm256_unpacklo_ps(c, d),
               cd1     = _mm256_unpackhi_ps(c, d);
  const __m256 steps[] = {_mm256_shuffle_ps(ab0, cd0, 0x44), _mm256_shuffle_ps(ab0, cd0, 0xee),
                          _mm256_shuffle_ps(ab1, cd1, 0x44), _mm256_shuffle_ps(ab1, cd1, 0xee)};
  for (int p = 0; p < 4; ++p) {
    _mm_storeu_ps(to + p * width, _mm256_castps256_ps128(steps[p]));
    _mm_storeu_ps(to + (p + 4) * width, _mm256_extractf128_ps(steps[p], 1));
  }
}
template <int width, class T>
inline void pack_two(const T* from, std::int64_t across, float* to) {
  const __m256 a = load_eight(from), b = load_eight(from + across);
  const __m256 pairs[] = {_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)};
  for (int p = 0; p < 2; ++p) {
    const __m128 low = _mm256_castps256_ps128(pairs[p]), high = _mm256_extractf128_ps(pairs[p], 1);
    _mm_storel_pi(reinterpret_cast<__m64*>(to + 2 * p * width), low);
    _mm_storeh_pi(reinterpret_cast<__m64*>(to + (2 * p + 1) * width), low);
    _mm_storel_pi(reinterpret_cast<__m64*>(to + (2 * p + 4) * width), high);
    _mm_storeh_pi(reinterpret_cast<__m64*>(to + (2 * p + 5) * width), high);
  }
}

// Packs whole panels with vectors of 8 floats.
struct PackEights {
  // Adjacent panels of an operand whose lanes are contiguous in memory.
  template <int width, class T>
  static void copied(const T* from, std::int64_t along, std::int64_t panels, std::int64_t depth, float* to) {
    for (std::int64_t p = 0; p < depth; ++p) {
      for (std::int64_t panel = 0; panel < panels; ++panel)
        copy_lanes<width>(from + p * along + panel * width, 0, to + (panel * depth + p) * width);
    }
  }

  // One panel of an operand whose steps of k are contiguous.
  template <int width, class T>
  static void transposed(const T* from, std::int64_t across, std::int64_t depth, float* to) {
    static_assert(width % 2 == 0);
    std::int64_t p = 0;
    for (; p + 8 <= depth; p += 8) {
      int lane = 0;
      for (; lane + 4 <= width; lane += 4) pack_four<width>(from + lane * across + p, across, to + p * width + lane);
      for (; lane < width; lane += 2) pack_two<width>(from + lane * across + p, across, to + p * width + lane);
    }
    pack_some<width>(from, across, 1, width, p, depth, to);
  }
};

// Lanes and steps of k of an operand: `lanes` rows of a, or columns of b. They are `across` and `along` elements apart.
template <class T>
struct OperandPart {
  const T* from;
  std::int64_t across, along, lanes, depth;
};
template <class T>
OperandPart<T> rows_of(const Matrix<T>& a, std::int64_t row, std::int64_t step, std::int64_t rows, std::int64_t depth) {
  return {a.data + row * a.row_stride + step * a.col_stride, a.row_stride, a.col_stride, rows, depth};
}
template <class T>
OperandPart<T> columns_of(const Matrix<T>& b, std::int64_t col, std::int64_t step, std::int64_t cols,
                          std::int64_t depth) {
  return {b.data + step * b.row_stride + col * b.col_stride, b.col_stride, b.row_stride, cols, depth};
}

// Packs into as many panels as needed.
template <class Packing, int width, class T>
void pack_panels(const OperandPart<T>& part, float* to) {
  const auto [from, across, along, lanes, depth] = part;
  const std::int64_t whole                       = lanes / width;
  if (across == 1) {
    Packing::template copied<width>(from, along, whole, depth, to);
  } else {
    for (std::int64_t panel = 0; panel < whole; ++panel) {
      const T* const at = from + panel * width * across;
      float* const into = to + panel * width * depth;
      if (along == 1) {
        Packing::template transposed<width>(at, across, depth, into);
      } else {
        pack_some<width>(at, across, along, width, 0, depth, into);
      }
    }
  }
  if (whole * width < lanes) {
    pack_some<width>(from + whole * width * across, across, along, lanes - whole * width, 0, depth,
                     to + whole * width * depth);
  }
}

}  // namespace
}  // namespace stepgraph::cpu
