#pragma once
#include <immintrin.h>

#include <cstdint>

#include "ops/cpu/gemm_x86.hpp"

// The product of ops/cpu/gemm_x86.hpp for vectors of one width. A panel of columns stays in the first-level cache, and
// all packed panels of rows pass by it. They are the narrower ones, so that less comes from the second-level cache:
// with AVX-512 about 4 bytes per cycle. Everything is in an anonymous namespace, because each file that includes this
// header compiles it for other instructions.
namespace stepgraph::cpu {
namespace {

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// --- packing ---------------------------------------------------------------------------------------------------------

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

// Adjacent whole panels of an operand whose lanes are contiguous in memory.
template <int width, class T>
void pack_copied(const T* from, std::int64_t along, std::int64_t panels, std::int64_t depth, float* to) {
  for (std::int64_t p = 0; p < depth; ++p) {
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      const T* const row = from + p * along + panel * width;
      float* const at    = to + (panel * depth + p) * width;
      int i              = 0;
      for (; i + 8 <= width; i += 8) _mm256_storeu_ps(at + i, load_eight(row + i));
      for (; i + 4 <= width; i += 4) _mm_storeu_ps(at + i, load_four(row + i));
      for (; i < width; ++i) at[i] = widen(row[i]);
    }
  }
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

// One whole panel of an operand whose steps of k are contiguous.
template <int width, class T>
void pack_transposed(const T* from, std::int64_t across, std::int64_t depth, float* to) {
  static_assert(width % 2 == 0);
  std::int64_t p = 0;
  for (; p + 8 <= depth; p += 8) {
    int lane = 0;
    for (; lane + 4 <= width; lane += 4) pack_four<width>(from + lane * across + p, across, to + p * width + lane);
    for (; lane < width; lane += 2) pack_two<width>(from + lane * across + p, across, to + p * width + lane);
  }
  pack_some<width>(from, across, 1, width, p, depth, to);
}

// `lanes` lanes into as many panels as needed.
template <int width, class T>
void pack_panels(const T* from, std::int64_t across, std::int64_t along, std::int64_t lanes, std::int64_t depth,
                 float* to) {
  const std::int64_t whole = lanes / width;
  if (across == 1) {
    pack_copied<width>(from, along, whole, depth, to);
  } else {
    for (std::int64_t panel = 0; panel < whole; ++panel) {
      const T* const at = from + panel * width * across;
      float* const into = to + panel * width * depth;
      if (along == 1) {
        pack_transposed<width>(at, across, depth, into);
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

// --- register blocks -------------------------------------------------------------------------------------------------

// The output of a register block: out = ((base +) sums (+ bias)) (times).
struct X86Out {
  float* out;
  const float* base;
  std::int64_t stride;
  const float* bias;
  const float* times;
  std::int64_t cols;  // columns that exist, where they are not all
};

// One register block over one block of k. `Lanes` has the vectors' operations. a is packed in panels of `width` rows;
// the first `rows` of them exist. If not `whole`, only some columns exist; each element gets the same operations.
template <class Lanes, int width, int vectors, int rows, bool whole>
void multiply_panels(const float* a, const float* b, std::int64_t depth, const X86Out& to) {
  using V             = typename Lanes::Vector;
  constexpr int lanes = Lanes::size, unrolled = 4;
  // Copies, because the compiler cannot exclude that stores modify `to`.
  const auto [out, base, stride, bias, times, cols] = to;
  typename Lanes::Mask masks[vectors];
  if constexpr (!whole) {
    for (int j = 0; j < vectors; ++j) masks[j] = Lanes::mask(cols - j * lanes);
  }
  const auto get = [&](const float* from, int j) __attribute__((always_inline)) {
    if constexpr (whole)
      return Lanes::load(from + j * lanes);
    else
      return Lanes::load(from + j * lanes, masks[j]);
  };
  V sum[rows][vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) sum[i][j] = Lanes::zero();
  }
  const auto step = [&](const float* left_at, const float* right_at) __attribute__((always_inline)) {
    V right[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) right[j] = Lanes::load(right_at + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const V left = Lanes::all(left_at[i]);
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) sum[i][j] = Lanes::multiply_add(left, right[j], sum[i][j]);
    }
  };
  const auto steps = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < unrolled; ++p) step(a + p * width, b + p * lanes * vectors);
    a += unrolled * width;
    b += unrolled * lanes * vectors;
  };
  // Rows of the output are fetched one by one: all at once would keep the operands waiting.
  const std::int64_t many = depth / unrolled, fetched = least(many, rows);
  const float* row = out;
  for (std::int64_t i = 0; i < fetched; ++i, row += stride) {
    __builtin_prefetch(row, 1);
    if constexpr (whole) {
      if constexpr (vectors * lanes > 16) __builtin_prefetch(row + 16, 1);
      __builtin_prefetch(row + lanes * vectors - 1, 1);
    }
    steps();
  }
  for (std::int64_t i = fetched; i < many; ++i) steps();
  for (std::int64_t p = many * unrolled; p < depth; ++p, a += width, b += lanes * vectors) step(a, b);
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      V value = sum[i][j];
      if (base != nullptr) value = Lanes::add(get(base + i * stride, j), value);
      if (bias != nullptr) value = Lanes::add(value, get(bias, j));
      if (times != nullptr) value = Lanes::multiply(value, get(times + i * stride, j));
      if constexpr (whole)
        Lanes::store(out + i * stride + j * lanes, value);
      else
        Lanes::store(out + i * stride + j * lanes, value, masks[j]);
    }
  }
}

using X86Panels = void (*)(const float* a, const float* b, std::int64_t depth, const X86Out& to);

// multiply_panels for 1 to `width` rows.
template <class Lanes, int width, int vectors>
struct PanelTable {
  X86Panels whole[width + 1] = {}, some[width + 1] = {};
  template <int rows>
  constexpr void set() {
    if constexpr (rows > 0) {
      whole[rows] = multiply_panels<Lanes, width, vectors, rows, true>;
      some[rows]  = multiply_panels<Lanes, width, vectors, rows, false>;
      set<rows - 1>();
    }
  }
  constexpr PanelTable() { set<width>(); }
};
template <class Lanes, int width, int vectors>
constexpr PanelTable<Lanes, width, vectors> panel_table;

// --- the product -----------------------------------------------------------------------------------------------------

// The length of parts that cover `size`: almost equal, at most `most`, a multiple of `of`.
inline std::int64_t equal_parts(std::int64_t size, std::int64_t most, std::int64_t of) {
  const std::int64_t parts = (size + most - 1) / most;
  return ((size + parts - 1) / parts + of - 1) / of * of;
}

// Register blocks are `width` rows by `vectors` vectors. Up to `max_rows` rows and `max_cols` columns are packed at a
// time, which stay in the second-level cache.
template <class Lanes, int width, int vectors, std::int64_t max_rows, std::int64_t max_cols, class T>
void multiply_blocks(X86Blocks& packed, const PanelProduct<T>& product, const PartDone& done) {
  constexpr std::int64_t panel = vectors * Lanes::size, max_depth = X86Blocks::max_depth;
  constexpr std::int64_t done_cols = 8 * panel;  // as many as make a call worth it and are still in cache
  static_assert(max_cols % panel == 0 && max_cols <= X86Blocks::max_cols);
  static_assert(max_rows % width == 0 && max_rows <= X86Blocks::max_rows);
  if (product.m <= 0 || product.n <= 0) return;
  constexpr const PanelTable<Lanes, width, vectors>& table = panel_table<Lanes, width, vectors>;
  const std::int64_t m = product.m, n = product.n, k = product.k, stride = product.c_stride;
  const Matrix<T>&a = product.a, &b = product.b;
  const std::int64_t length = equal_parts(k, max_depth, 4);
  const std::int64_t across = equal_parts(n, max_cols, panel), down = equal_parts(m, max_rows, width);
  for (std::int64_t left = 0; left < n; left += across) {
    const std::int64_t right = least(n, left + across);
    for (std::int64_t first = 0; first < k; first += length) {
      const std::int64_t depth = least(length, k - first);
      const bool last          = first + depth == k;
      const float* const base  = first == 0 ? product.base : product.c;
      const float* const times = last ? product.times : nullptr;
      pack_panels<static_cast<int>(panel)>(b.data + first * b.row_stride + left * b.col_stride, b.col_stride,
                                           b.row_stride, right - left, depth, packed.b);
      for (std::int64_t top = 0; top < m; top += down) {
        const std::int64_t bottom = least(m, top + down);
        pack_panels<width>(a.data + top * a.row_stride + first * a.col_stride, a.row_stride, a.col_stride, bottom - top,
                           depth, packed.a);
        for (std::int64_t col = left, done_to = left; col < right; col += panel) {
          const std::int64_t cols = right - col;
          for (std::int64_t row = top; row < bottom; row += width) {
            const std::int64_t at = row * stride + col, rows = least(width, bottom - row);
            const X86Out to{product.c + at,
                            base == nullptr ? nullptr : base + at,
                            stride,
                            last && product.bias != nullptr ? product.bias + col : nullptr,
                            times == nullptr ? nullptr : times + at,
                            cols};
            (cols >= panel ? table.whole : table.some)[rows](packed.a + (row - top) * depth,
                                                             packed.b + (col - left) * depth, depth, to);
          }
          const std::int64_t end = least(col + panel, right);
          if (last && done.call != nullptr && (end == right || end - done_to >= done_cols)) {
            done.call(done.of, top, bottom - top, done_to, end - done_to);
            done_to = end;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace stepgraph::cpu
