#pragma once
#include <cstdint>

#include "ops/cpu/gemm/gemm_bf16_blocks.hpp"

// The kernels of bf16 products for x86-64, around the instructions they use. The instructions are an argument, so that
// a test can replace them by plain C++ on machines that do not have them. Everything is in an anonymous namespace,
// because each file that includes this header compiles it for other instructions.
namespace stepgraph::cpu {
namespace {

// AVX-512 BF16. Dots has Sums (a vector of 16 f32), Pairs (a vector of 16 pairs of bf16) and these functions: zero();
// load(16 pairs); all(a pair); add(sums, a, b), which adds both products of each pair; store(to, sums).
template <class Dots>
struct DotKernel {
  static constexpr int rows = 12, cols = 32, a_group = 2, b_group = 2, step = 2, bytes = 64;
  static constexpr std::int64_t max_rows = 504, max_cols = 512, max_depth = 512, at_once = 128;
  static void begin() {}
  static void end() {}

  static void multiply(const std::uint16_t* a, const std::uint16_t* b, std::int64_t depth, std::int64_t used,
                       float* block) {
    if (used <= 4) return multiply_rows<4>(a, b, depth, block);
    if (used <= 8) return multiply_rows<8>(a, b, depth, block);
    multiply_rows<12>(a, b, depth, block);
  }

 private:
  // 24 of 32 registers hold sums.
  template <int used>
  static void multiply_rows(const std::uint16_t* a, const std::uint16_t* b, std::int64_t depth, float* block) {
    typename Dots::Sums sum[used][2];
#pragma GCC unroll 12
    for (int i = 0; i < used; ++i) sum[i][0] = sum[i][1] = Dots::zero();
    for (std::int64_t p = 0; p < depth; p += 2, a += 2 * rows, b += 2 * cols) {
      const typename Dots::Pairs first = Dots::load(b), second = Dots::load(b + cols);
#pragma GCC unroll 12
      for (int i = 0; i < used; ++i) {
        const typename Dots::Pairs left = Dots::all(a + 2 * i);
        sum[i][0]                       = Dots::add(sum[i][0], left, first);
        sum[i][1]                       = Dots::add(sum[i][1], left, second);
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < used; ++i) {
      Dots::store(block + i * cols, sum[i][0]);
      Dots::store(block + i * cols + 16, sum[i][1]);
    }
  }
};

// AMX. Tiles has 8 tiles of 16 rows of 64 bytes and these functions: begin() and end(), which set them up and give
// them back; zero<tile>(); load<tile>(from, stride in bytes); add<sums, a, b>(), which multiplies 16 rows by 16 columns
// over 32 steps of k; store<tile>(to, stride in bytes).
template <class Tiles>
struct TileKernel {
  static constexpr int rows = 32, cols = 32, a_group = 32, b_group = 2, step = 32, bytes = 64;
  static constexpr std::int64_t max_rows = 512, max_cols = 512, max_depth = 512, at_once = 128;
  static void begin() { Tiles::begin(); }
  static void end() { Tiles::end(); }

  // Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns.
  static void multiply(const std::uint16_t* a, const std::uint16_t* b, std::int64_t depth, std::int64_t used,
                       float* block) {
    constexpr std::int64_t of_a = 64, of_b = 4 * cols, of_sums = 4 * cols;  // strides
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    if (used <= 16) {
      for (std::int64_t p = 0; p < depth; p += step, a += step * rows, b += step * cols) {
        Tiles::template load<6>(b, of_b);
        Tiles::template load<4>(a, of_a);
        Tiles::template load<7>(b + 32, of_b);
        Tiles::template add<0, 4, 6>();
        Tiles::template add<1, 4, 7>();
      }
    } else {
      Tiles::template zero<2>();
      Tiles::template zero<3>();
      for (std::int64_t p = 0; p < depth; p += step, a += step * rows, b += step * cols) {
        Tiles::template load<6>(b, of_b);
        Tiles::template load<4>(a, of_a);
        Tiles::template load<5>(a + 16 * step, of_a);
        Tiles::template load<7>(b + 32, of_b);
        Tiles::template add<0, 4, 6>();
        Tiles::template add<2, 5, 6>();
        Tiles::template add<1, 4, 7>();
        Tiles::template add<3, 5, 7>();
      }
      Tiles::template store<2>(block + 16 * cols, of_sums);
      Tiles::template store<3>(block + 16 * cols + 16, of_sums);
    }
    Tiles::template store<0>(block, of_sums);
    Tiles::template store<1>(block + 16, of_sums);
  }
};

}  // namespace
}  // namespace stepgraph::cpu
