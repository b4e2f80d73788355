#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "ops/cpu/gemm/x86/bf16.hpp"
#include "ops/cpu/instructions.hpp"
#include "ops/tape/tensor.hpp"
#include "tests/x86/checks.hpp"
#include "tests/x86/operands.hpp"

namespace sg  = stepgraph;
namespace cpu = stepgraph::cpu;
using sg::testing::x86::numbers;
using sg::testing::x86::Shape;
using sg::testing::x86::Stored;

namespace {

float widened(std::uint16_t bits) { return sg::wide(sg::bf16::from_bits(bits)); }

// --- the instructions in plain C++, in the order of sums of Intel's manual -------------------------------------------

struct PlainDots {
  struct Sums {
    float at[16];
  };
  struct Pairs {
    std::uint16_t at[32];
  };
  static Sums zero() { return {}; }
  static Pairs load(const std::uint16_t* from) {
    Pairs made;
    std::memcpy(&made, from, sizeof made);
    return made;
  }
  static Pairs all(const std::uint16_t* from) {
    Pairs made;
    for (int i = 0; i < 32; ++i) made.at[i] = from[i % 2];
    return made;
  }
  static Sums add(Sums sums, const Pairs& a, const Pairs& b) {
    for (int i = 0; i < 16; ++i) {
      for (const int j : {2 * i + 1, 2 * i}) sums.at[i] = std::fma(widened(a.at[j]), widened(b.at[j]), sums.at[i]);
    }
    return sums;
  }
  static void store(float* to, const Sums& sums) { std::memcpy(to, &sums, sizeof sums); }
};

struct PlainTiles {
  static inline bool set_up = false;
  static inline std::uint32_t tiles[8][16][16];
  static void begin() { set_up = true; }
  static void end() { set_up = false; }
  template <int tile>
  static void zero() {
    std::memset(tiles[tile], set_up ? 0 : 255, sizeof tiles[tile]);
  }
  template <int tile>
  static void load(const void* from, std::int64_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, sizeof tiles[tile][row]);
  }
  template <int sums, int a, int b>
  static void add() {
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        float parts[2] = {};
        for (int k = 0; k < 16; ++k) {
          const std::uint32_t left = tiles[a][m][k], right = tiles[b][k][n];
          parts[0] = std::fma(widened(left & 0xffff), widened(right & 0xffff), parts[0]);
          parts[1] = std::fma(widened(left >> 16 & 0xffff), widened(right >> 16 & 0xffff), parts[1]);
        }
        tiles[sums][m][n] =
            std::bit_cast<std::uint32_t>(std::bit_cast<float>(tiles[sums][m][n]) + (parts[0] + parts[1]));
      }
    }
  }
  template <int tile>
  static void store(void* to, std::int64_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], sizeof tiles[tile][row]);
  }
};

// --- the expected sums, without packing ------------------------------------------------------------------------------

enum class Order { dots, tiles };

float block_of_k(Order order, const sg::Matrix<sg::bf16>& a, const sg::Matrix<sg::bf16>& b, std::int64_t depth) {
  const auto left  = [&](std::int64_t p) { return p < depth ? sg::wide(a.data[p * a.col_stride]) : 0.0F; };
  const auto right = [&](std::int64_t p) { return p < depth ? sg::wide(b.data[p * b.row_stride]) : 0.0F; };
  float sum        = 0;
  if (order == Order::dots) {
    for (std::int64_t p = 0; p < depth; p += 2) {
      for (const std::int64_t q : {p + 1, p}) sum = std::fma(left(q), right(q), sum);
    }
    return sum;
  }
  for (std::int64_t p = 0; p < depth; p += 32) {
    float parts[2] = {};
    for (std::int64_t q = p; q < p + 32; ++q) parts[q % 2] = std::fma(left(q), right(q), parts[q % 2]);
    sum += parts[0] + parts[1];
  }
  return sum;
}

template <class Out>
using Multiply = void (*)(cpu::Bf16Room&, const cpu::Bf16Product<Out>&, const sg::PartDone&);

// The number of elements whose bits are wrong, or that were not announced as done exactly once. `extras`: bit 0 a base,
// bit 1 in place, bit 2 a bias, bit 3 factors.
template <class Out>
int wrong(Multiply<Out> multiply, Order order, const Shape& shape, Stored of_a, Stored of_b, int extras) {
  const auto [m, n, k]      = shape;
  const std::int64_t stride = n + 3;
  const auto a = numbers<sg::bf16>(2 * m * k, 1), b = numbers<sg::bf16>(2 * k * n, 2), bias = numbers<sg::bf16>(n, 3),
             times = numbers<sg::bf16>(m * stride, 4);
  const auto base  = numbers<Out>(m * stride, 5);
  const bool adds = (extras & 1) != 0, in_place = (extras & 2) != 0, biased = (extras & 4) != 0,
             scaled  = (extras & 8) != 0;
  std::vector<Out> c = in_place ? base : std::vector<Out>(base.size(), Out(7.0F)), expected = c;
  const cpu::Bf16Product<Out> product{.m        = m,
                                      .n        = n,
                                      .k        = k,
                                      .a        = matrix(a, m, k, of_a),
                                      .b        = matrix(b, k, n, of_b),
                                      .c        = c.data(),
                                      .base     = !adds      ? nullptr
                                                  : in_place ? c.data()
                                                             : base.data(),
                                      .c_stride = stride,
                                      .bias     = biased ? bias.data() : nullptr,
                                      .times    = scaled ? times.data() : nullptr};
  const std::int64_t step = order == Order::dots ? 2 : 32, blocks = (k + 511) / 512;
  const std::int64_t length = ((k + blocks - 1) / blocks + step - 1) / step * step;
  constexpr bool wide       = std::is_same_v<Out, float>;  // then the base is the first summand
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      const auto at = static_cast<std::size_t>(i * stride + j);
      float sum     = 0;
      for (std::int64_t first = 0; first < k; first += length) {
        const float part = block_of_k(order, from_col(from_row(product.a, i), first),
                                      from_row(from_col(product.b, j), first), std::min(length, k - first));
        sum              = first > 0 ? sum + part : wide && adds ? sg::wide(base[at]) + part : part;
      }
      if (biased) sum += sg::wide(bias[static_cast<std::size_t>(j)]);
      if (adds && !wide) sum = sg::wide(base[at]) + sum;
      expected[at] = sg::narrow<Out>(sum);
      if (scaled) expected[at] = sg::narrow<Out>(sg::wide(expected[at]) * sg::wide(times[at]));
    }
  }
  struct Seen {
    std::int64_t stride;
    std::vector<int> times;
  } seen{stride, std::vector<int>(c.size())};
  const auto count = [](const void* of, std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) {
    auto* const to = const_cast<Seen*>(static_cast<const Seen*>(of));
    for (std::int64_t i = row; i < row + rows; ++i) {
      for (std::int64_t j = col; j < col + cols; ++j) ++to->times[static_cast<std::size_t>(i * to->stride + j)];
    }
  };
  static const std::unique_ptr<cpu::Bf16Room> room(new cpu::Bf16Room);
  multiply(*room, product, {count, &seen});
  int number = 0;
  for (std::size_t i = 0; i < c.size(); ++i) {
    const bool exists = static_cast<std::int64_t>(i) % stride < n;
    number += std::memcmp(&c[i], &expected[i], sizeof(Out)) != 0 || seen.times[i] != (exists ? 1 : 0);
  }
  return number;
}

struct Kernel {
  const char* name;
  bool here;
  Order order;
  Multiply<float> into_float;
  Multiply<sg::bf16> into_bf16;
};

}  // namespace

bool sg::testing::x86::check_bf16_products() {
  const Kernel kernels[] = {
      {"avx512-bf16, emulated", true, Order::dots, cpu::multiply_bf16<cpu::DotKernel<PlainDots>, float>,
       cpu::multiply_bf16<cpu::DotKernel<PlainDots>, sg::bf16>},
      {"amx, emulated", true, Order::tiles, cpu::multiply_bf16<cpu::TileKernel<PlainTiles>, float>,
       cpu::multiply_bf16<cpu::TileKernel<PlainTiles>, sg::bf16>},
      {"avx512-bf16", cpu::has(cpu::Instructions::avx512_bf16), Order::dots, cpu::multiply_avx512_bf16<float>,
       cpu::multiply_avx512_bf16<sg::bf16>},
      {"amx", cpu::has(cpu::Instructions::amx), Order::tiles, cpu::multiply_amx<float>, cpu::multiply_amx<sg::bf16>}};
  bool right = true;
  for (const Kernel& kernel : kernels) {
    if (!kernel.here) continue;
    int cases = 0;
    for (const Shape& shape : {Shape{1, 1, 1},
                               {5, 7, 3},
                               {12, 32, 8},
                               {13, 33, 31},
                               {17, 40, 65},
                               {64, 96, 100},
                               {37, 170, 513},
                               {25, 150, 1030},
                               {16, 31, 512},
                               {4, 20, 34},
                               {530, 9, 5},
                               {3, 530, 600}}) {
      for (const Stored a : {Stored::rows, Stored::columns, Stored::apart}) {
        for (const Stored b : {Stored::rows, Stored::columns, Stored::apart}) {
          const int extras = cases % 16 == 2 ? 3 : cases % 16;
          const int number = wrong<float>(kernel.into_float, kernel.order, shape, a, b, extras) +
                             wrong<sg::bf16>(kernel.into_bf16, kernel.order, shape, a, b, extras);
          if (number > 0) {
            std::printf("%s: %d elements of a product of %dx%dx%d are wrong (operands %d, %d; extras %d)\n",
                        kernel.name, number, static_cast<int>(shape.m), static_cast<int>(shape.n),
                        static_cast<int>(shape.k), static_cast<int>(a), static_cast<int>(b), extras);
            right = false;
          }
          ++cases;
        }
      }
    }
    std::printf("products of bf16, %s: %d cases\n", kernel.name, cases);
  }
  return right;
}
