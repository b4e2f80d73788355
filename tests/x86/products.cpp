#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "ops/cpu/gemm/gemm.hpp"
#include "ops/cpu/gemm/x86/x86.hpp"
#include "tests/x86/checks.hpp"
#include "tests/x86/operands.hpp"

namespace sg = stepgraph;
using sg::testing::x86::numbers;
using sg::testing::x86::Shape;
using sg::testing::x86::Stored;

namespace stepgraph::cpu {
void multiply_plain_lanes(X86Blocks& packed, const PanelProduct<float>& product);  // tests/x86/plain_lanes.cpp
}

namespace {

// Adds the products of `depth` values of a with as many rows of b to the sums of n columns, in the order of the rows.
[[gnu::target_clones("fma", "default")]] void add_products(const float* a, std::int64_t depth, const float* b,
                                                           std::int64_t n, float* sums) {
  for (std::int64_t p = 0; p < depth; ++p) {
    for (std::int64_t j = 0; j < n; ++j) sums[j] = __builtin_fmaf(a[p], b[p * n + j], sums[j]);
  }
}

// The number of elements whose bits are wrong. `extras`: bit 0 a base, bit 1 in place, bit 2 a bias, bit 3 factors.
// Tiles are computed `at_once` in a call.
template <class T>
int wrong(sg::GemmKernel kernel, const Shape& shape, Stored of_a, Stored of_b, int extras, std::int64_t at_once) {
  const auto [m, n, k]      = shape;
  const std::int64_t stride = n + 3;
  const auto a = numbers<T>(2 * m * k, 1), b = numbers<T>(2 * k * n, 2), bias = numbers<T>(n, 3),
             times = numbers<T>(m * stride, 4);
  const auto base  = numbers<float>(m * stride, 5);
  const bool adds = (extras & 1) != 0, in_place = (extras & 2) != 0;
  const bool biased = (extras & 4) != 0, scaled = (extras & 8) != 0;
  std::vector<float> c = in_place ? base : std::vector<float>(base.size(), 7), expected = c;
  const sg::Gemm<T, float> gemm{.m = m,
                                .n = n,
                                .k = k,
                                .a = matrix(a, m, k, of_a),
                                .b = matrix(b, k, n, of_b),
                                .c = {c.data(), adds ? (in_place ? c.data() : base.data()) : nullptr, m * stride},
                                .c_stride = stride,
                                .bias     = biased ? bias.data() : nullptr,
                                .times    = scaled ? times.data() : nullptr};
  const std::int64_t blocks = (k + 127) / 128, length = ((k + blocks - 1) / blocks + 3) / 4 * 4;
  // With factors of 2 bytes the whole sum is computed first.
  const bool sum_first = sizeof(T) == 2 && (biased || scaled);
  std::vector<float> row_of_a(static_cast<std::size_t>(k)), rows_of_b(static_cast<std::size_t>(k * n));
  for (std::int64_t p = 0; p < k; ++p) {
    for (std::int64_t j = 0; j < n; ++j) {
      rows_of_b[static_cast<std::size_t>(p * n + j)] =
          sg::wide(gemm.b.data[p * gemm.b.row_stride + j * gemm.b.col_stride]);
    }
  }
  std::vector<float> sums(static_cast<std::size_t>(n)), parts(sums.size());
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t p = 0; p < k; ++p)
      row_of_a[static_cast<std::size_t>(p)] = sg::wide(gemm.a.data[i * gemm.a.row_stride + p * gemm.a.col_stride]);
    for (std::int64_t first = 0; first < k; first += length) {
      std::fill(parts.begin(), parts.end(), 0.0F);
      add_products(row_of_a.data() + first, std::min(length, k - first), rows_of_b.data() + first * n, n, parts.data());
      for (std::int64_t j = 0; j < n; ++j) {
        const auto at    = static_cast<std::size_t>(i * stride + j);
        const float part = parts[static_cast<std::size_t>(j)];
        float& sum       = sums[static_cast<std::size_t>(j)];
        sum              = first > 0 ? sum + part : adds && !sum_first ? base[at] + part : part;
      }
    }
    for (std::int64_t j = 0; j < n; ++j) {
      const auto at = static_cast<std::size_t>(i * stride + j);
      float sum     = sums[static_cast<std::size_t>(j)];
      if (biased) sum += sg::wide(bias[static_cast<std::size_t>(j)]);
      if (adds && sum_first) sum = base[at] + sum;
      expected[at] = scaled ? sum * sg::wide(times[at]) : sum;
    }
  }
  const std::int64_t tiles = sg::num_gemm_tiles<T>(m, n, kernel);
  for (std::int64_t first = 0; first < tiles; first += at_once)
    sg::gemm_tiles(gemm, first, std::min(tiles, first + at_once), kernel);
  int count = 0;
  for (std::size_t i = 0; i < c.size(); ++i) count += std::memcmp(&c[i], &expected[i], sizeof(float)) != 0;
  return count;
}

// Whether the blocks of AVX-512, with emulated vectors, give the bits of AVX2. Only they read rows of a in place, where
// there are few columns.
bool blocks_agree(const Shape& shape, Stored of_a, Stored of_b, int extras) {
  const auto [m, n, k]      = shape;
  const std::int64_t stride = n + 3;
  const auto a = numbers<float>(2 * m * k, 1), b = numbers<float>(2 * k * n, 2), bias = numbers<float>(n, 3);
  const auto base = numbers<float>(m * stride, 4), times = numbers<float>(m * stride, 5);
  const auto room = std::make_unique<sg::cpu::X86Blocks>();
  std::vector<float> found(base.size(), 7), expected = found;
  sg::PanelProduct<float> product{.m        = m,
                                  .n        = n,
                                  .k        = k,
                                  .a        = matrix(a, m, k, of_a),
                                  .b        = matrix(b, k, n, of_b),
                                  .c        = expected.data(),
                                  .base     = (extras & 1) != 0 ? base.data() : nullptr,
                                  .c_stride = stride,
                                  .bias     = (extras & 4) != 0 ? bias.data() : nullptr,
                                  .times    = (extras & 8) != 0 ? times.data() : nullptr};
  sg::cpu::multiply_avx2(*room, product, {});
  product.c = found.data();
  sg::cpu::multiply_plain_lanes(*room, product);
  return std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0;
}

}  // namespace

bool sg::testing::x86::check_products() {
  bool right = true;
  for (const auto& [kernel, name] : {std::pair(sg::GemmKernel::avx2, "avx2"), {sg::GemmKernel::avx512, "avx512"}}) {
    if (!sg::has(kernel)) continue;
    int cases = 0;
    for (const Shape& shape : {Shape{1, 1, 1},
                               {5, 7, 3},
                               {12, 32, 8},
                               {13, 33, 9},
                               {64, 96, 100},
                               {37, 300, 513},
                               {25, 270, 1030},
                               {250, 40, 257},
                               {9, 900, 20},
                               {7, 1100, 300},
                               {240, 1024, 128},
                               {11, 31, 512},
                               {150, 130, 21}}) {
      for (const Stored a : {Stored::rows, Stored::columns, Stored::apart}) {
        for (const Stored b : {Stored::rows, Stored::columns, Stored::apart}) {
          const int extras = cases % 16 == 2 ? 3 : cases % 16;
          const int number = wrong<float>(kernel, shape, a, b, extras, cases % 3 + 1) +
                             wrong<sg::bf16>(kernel, shape, a, b, extras, 64) +
                             wrong<sg::f16>(kernel, shape, a, b, extras, 5);
          if (kernel == sg::GemmKernel::avx2 && !blocks_agree(shape, a, b, extras)) {
            std::printf("blocks of AVX-512, emulated: a product of %dx%dx%d is wrong (operands %d, %d; extras %d)\n",
                        static_cast<int>(shape.m), static_cast<int>(shape.n), static_cast<int>(shape.k),
                        static_cast<int>(a), static_cast<int>(b), extras);
            right = false;
          }
          if (number > 0) {
            std::printf("%s: %d elements of a product of %dx%dx%d are wrong (operands %d, %d; extras %d)\n", name,
                        number, static_cast<int>(shape.m), static_cast<int>(shape.n), static_cast<int>(shape.k),
                        static_cast<int>(a), static_cast<int>(b), extras);
            right = false;
          }
          ++cases;
        }
      }
    }
    std::printf("products, %s: %d cases\n", name, cases);
  }
  return right;
}
