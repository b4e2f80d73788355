#include <algorithm>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/cpu/gemm/gemm.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

namespace {

// The kernels for bf16 that this machine has, and the one that widens it.
std::vector<sg::GemmKernel> kernels() {
  std::vector<sg::GemmKernel> found{sg::GemmKernel::fastest, sg::GemmKernel::own};
  for (const auto kernel : {sg::GemmKernel::neon, sg::GemmKernel::sve, sg::GemmKernel::avx512,
                            sg::GemmKernel::neon_bf16, sg::GemmKernel::avx512_bf16, sg::GemmKernel::amx}) {
    if (sg::has(kernel)) found.push_back(kernel);
  }
  return found;
}

template <class T>
std::vector<T> numbers(std::int64_t count, std::uint64_t seed) {
  std::vector<T> made;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(count); ++i)
    made.push_back(
        T(static_cast<float>(static_cast<double>(sg::testing::mix(seed * 1'000'003 + i) >> 40) * 0x1p-23 - 1)));
  return made;
}

enum class Stored { rows, columns, apart };  // apart: neither stride is 1
constexpr Stored all_stored[] = {Stored::rows, Stored::columns, Stored::apart};

sg::Matrix<sg::bf16> matrix(const std::vector<sg::bf16>& of, std::int64_t rows, std::int64_t cols, Stored stored) {
  if (stored == Stored::columns) return {of.data(), 1, rows};
  if (stored == Stored::apart) return {of.data(), 2 * cols + 3, 2};
  return {of.data(), cols, 1};
}
double at(const sg::Matrix<sg::bf16>& of, std::int64_t row, std::int64_t col) {
  return static_cast<double>(sg::wide(of.data[row * of.row_stride + col * of.col_stride]));
}

struct Shape {
  std::int64_t m, n, k;
};
// What is added and multiplied.
struct Extras {
  bool base, in_place, bias, times;
};

template <class Out>
struct Case {
  Shape shape;
  Extras extras;
  std::int64_t stride        = shape.n + 3;
  std::vector<sg::bf16> a    = numbers<sg::bf16>((shape.m + 1) * (2 * shape.k + 3), 1),
                        b    = numbers<sg::bf16>((shape.k + 1) * (2 * shape.n + 3), 2),
                        bias = numbers<sg::bf16>(shape.n, 3), times = numbers<sg::bf16>(shape.m * stride, 4);
  std::vector<Out> base = numbers<Out>(shape.m * stride, 5);

  [[nodiscard]] sg::Gemm<sg::bf16, Out> gemm(std::vector<Out>& c, Stored of_a, Stored of_b) const {
    const auto [m, n, k] = shape;
    return {.m        = m,
            .n        = n,
            .k        = k,
            .a        = matrix(a, m, k, of_a),
            .b        = matrix(b, k, n, of_b),
            .c        = {c.data(),
                  !extras.base      ? nullptr
                         : extras.in_place ? c.data()
                                           : base.data(),
                         m * stride},
            .c_stride = stride,
            .bias     = extras.bias ? bias.data() : nullptr,
            .times    = extras.times ? times.data() : nullptr};
  }
};

// Checks every element against sums in f64, and that nothing else is written.
template <class Out>
void check(sg::GemmKernel kernel, const Case<Out>& with, Stored of_a, Stored of_b) {
  const auto [m, n, k] = with.shape;
  const Extras& extras = with.extras;
  std::vector<Out> c   = extras.in_place ? with.base : std::vector<Out>(with.base.size(), Out(7.0F));
  const auto before    = c;
  const auto gemm      = with.gemm(c, of_a, of_b);
  sg::gemm(gemm, kernel);
  // Sums of numbers below 1 are rounded at most k times, by a unit in the last place of the largest sum of magnitudes.
  constexpr double once = std::is_same_v<Out, float> ? 0 : 0x1p-8;
  double worst          = 0;
  bool alone            = true;
  std::vector<double> rows, columns;  // widened once: the sums read each element many times
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t p = 0; p < k; ++p) rows.push_back(at(gemm.a, i, p));
  }
  for (std::int64_t j = 0; j < n; ++j) {
    for (std::int64_t p = 0; p < k; ++p) columns.push_back(at(gemm.b, p, j));
  }
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < with.stride; ++j) {
      const auto here = static_cast<std::size_t>(i * with.stride + j);
      if (j >= n) {
        alone = alone && std::memcmp(&c[here], &before[here], sizeof(Out)) == 0;
        continue;
      }
      double sum = 0, size = 0;
      const double *row = rows.data() + i * k, *column = columns.data() + j * k;
      for (std::int64_t p = 0; p < k; ++p) {
        const double term = row[p] * column[p];
        sum += term;
        size += std::abs(term);
      }
      const auto add = [&](double term) {
        sum += term;
        size += std::abs(term);
      };
      if (extras.base) add(static_cast<double>(sg::wide(with.base[here])));
      if (extras.bias) add(static_cast<double>(sg::wide(with.bias[static_cast<std::size_t>(j)])));
      const double factor = extras.times ? static_cast<double>(sg::wide(with.times[here])) : 1;
      const double bound =
          std::abs(factor) * (0x1p-23 * size * static_cast<double>(k + 3) + 2.01 * once * std::abs(sum)) + 1e-30;
      const double error = std::abs(static_cast<double>(sg::wide(c[here])) - sum * factor) / bound;
      worst              = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
    }
  }
  CAPTURE(static_cast<int>(kernel), m, n, k, static_cast<int>(of_a), static_cast<int>(of_b), extras.base,
          extras.in_place, extras.bias, extras.times);
  CHECK(alone);
  CHECK(worst <= 1);
}

template <class Out>
std::vector<Out> product(sg::GemmKernel kernel, const Case<Out>& with, Stored of_a = Stored::rows,
                         Stored of_b = Stored::rows) {
  std::vector<Out> c = with.base;
  sg::gemm(with.gemm(c, of_a, of_b), kernel);
  return c;
}
template <class Out>
bool same_bits(const std::vector<Out>& a, const std::vector<Out>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(Out)) == 0;
}

}  // namespace

TEMPLATE_TEST_CASE("products of bf16 of all sizes, layouts and epilogues agree with sums in f64", "[ops][gemm][bf16]",
                   float, sg::bf16) {
  const auto kernel = GENERATE(from_range(kernels()));
  int number        = 0;
  static int seen   = 0;
  for (const Shape& shape : {Shape{1, 1, 1},
                             {5, 7, 3},
                             {8, 12, 4},
                             {13, 33, 31},
                             {17, 40, 65},
                             {64, 96, 100},
                             {37, 170, 513},
                             {25, 150, 1030},
                             {16, 31, 1024},
                             {9, 100, 1500},
                             {300, 9, 5},
                             {3, 600, 70}}) {
    for (const Stored a : all_stored) {
      for (const Stored b : all_stored) {
        const int extras = number++ % 16;
        if (sg::testing::left_out(seen, 5)) continue;
        check(kernel,
              Case<TestType>{shape, {(extras & 1) != 0, (extras & 3) == 3, (extras & 4) != 0, (extras & 8) != 0}}, a,
              b);
      }
    }
  }
}

TEMPLATE_TEST_CASE("products of bf16 of every small number of rows, columns and steps are right", "[ops][gemm][bf16]",
                   float, sg::bf16) {
  const auto kernel = GENERATE(from_range(kernels()));
  for (std::int64_t m = 1; m <= 17; ++m) {
    const std::int64_t n = 1 + 7 * m % 34, k = 1 + 5 * m % 37;
    check(kernel, Case<TestType>{{m, n, k}, {m % 2 == 0, m % 4 == 0, m % 3 == 0, m % 5 == 0}}, all_stored[m % 3],
          all_stored[m / 3 % 3]);
  }
  for (std::int64_t k = 1; k <= 70; k += 3)
    check(kernel, Case<TestType>{{9, 14, k}, {}}, all_stored[k % 2], all_stored[k / 2 % 2]);
}

TEMPLATE_TEST_CASE("an element of a product of bf16 has the same bits in every tile, position and layout",
                   "[ops][gemm][bf16]", float, sg::bf16) {
  const auto kernel = GENERATE(from_range(kernels()));
  CAPTURE(static_cast<int>(kernel));
  const Case<TestType> with{{210, 310, 1100}, {true, true, true, false}};
  const auto expected      = product(kernel, with);
  const std::int64_t tiles = sg::num_gemm_tiles<sg::bf16>(210, 310, kernel);
  REQUIRE(tiles > 8);
  for (const std::int64_t of : {1, 3, 8}) {  // as threads would share them
    if (sg::testing::sanitized() && of != 3) continue;
    auto c          = with.base;
    const auto gemm = with.gemm(c, Stored::rows, Stored::rows);
    for (std::int64_t first = 0; first < tiles; first += of)
      sg::gemm_tiles(gemm, first, std::min(first + of, tiles), kernel);
    CAPTURE(of);
    CHECK(same_bits(c, expected));
  }
  for (const std::int64_t skip : {1, 5, 64}) {  // the rows and columns from `skip` on
    if (sg::testing::sanitized() && skip != 5) continue;
    auto c    = with.base;
    auto gemm = with.gemm(c, Stored::rows, Stored::rows);
    gemm.m -= skip, gemm.n -= skip;
    gemm.a = from_row(gemm.a, skip), gemm.b = from_col(gemm.b, skip);
    gemm.c.out  = gemm.c.out + skip * with.stride + skip;
    gemm.c.base = gemm.c.out;
    gemm.bias += skip;
    sg::gemm(gemm, kernel);
    bool same = true;
    for (std::int64_t i = skip; i < 210; ++i) {
      const auto from = static_cast<std::size_t>(i * with.stride + skip);
      same =
          same && std::memcmp(&c[from], &expected[from], static_cast<std::size_t>(310 - skip) * sizeof(TestType)) == 0;
    }
    CAPTURE(skip);
    CHECK(same);
  }
  // The same operands in other layouts.
  Case<TestType> turned = with;
  for (std::int64_t p = 0; p < 1100; ++p) {
    for (std::int64_t i = 0; i < 210; ++i)
      turned.a[static_cast<std::size_t>(p * 210 + i)] = with.a[static_cast<std::size_t>(i * 1100 + p)];
    for (std::int64_t j = 0; j < 310; ++j)
      turned.b[static_cast<std::size_t>(j * 1100 + p)] = with.b[static_cast<std::size_t>(p * 310 + j)];
  }
  CHECK(same_bits(product(kernel, turned, Stored::columns, Stored::columns), expected));
  Case<TestType> mixed = turned;
  mixed.b              = with.b;
  CHECK(same_bits(product(kernel, mixed, Stored::columns, Stored::rows), expected));
}

TEST_CASE("sums of small integers are exact in every kernel for bf16", "[ops][gemm][bf16]") {
  const auto kernel = GENERATE(from_range(kernels()));
  Case<float> with{{33, 45, 1300}, {}};
  for (auto* of : {&with.a, &with.b}) {
    for (sg::bf16& value : *of) value = sg::bf16(std::round(sg::wide(value) * 8));
  }
  const auto c = product(kernel, with);
  bool exact   = true;
  for (std::int64_t i = 0; i < 33; ++i) {
    for (std::int64_t j = 0; j < 45; ++j) {
      double sum = 0;
      for (std::int64_t p = 0; p < 1300; ++p)
        sum += at(matrix(with.a, 33, 1300, Stored::rows), i, p) * at(matrix(with.b, 1300, 45, Stored::rows), p, j);
      exact = exact && static_cast<double>(c[static_cast<std::size_t>(i * with.stride + j)]) == sum;
    }
  }
  CAPTURE(static_cast<int>(kernel));
  CHECK(exact);
}

TEMPLATE_TEST_CASE("NaN and infinity in an operand of bf16 stay in their row and column", "[ops][gemm][bf16]", float,
                   sg::bf16) {
  const auto kernel = GENERATE(from_range(kernels()));
  Case<TestType> with{{21, 30, 50}, {}};
  for (auto* of : {&with.a, &with.b}) {
    for (sg::bf16& value : *of) value = sg::bf16(std::abs(sg::wide(value)) + 1);  // no zero
  }
  with.a[4 * 50 + 49] = sg::bf16(std::numeric_limits<float>::quiet_NaN());
  with.b[49 * 30 + 7] = sg::bf16(std::numeric_limits<float>::infinity());
  const auto c        = product(kernel, with);
  bool right          = true;
  for (std::int64_t i = 0; i < 21; ++i) {
    for (std::int64_t j = 0; j < 30; ++j) {
      const float value = sg::wide(c[static_cast<std::size_t>(i * with.stride + j)]);
      right             = right && (i == 4   ? std::isnan(value)
                                    : j == 7 ? value > 1e38F && std::isinf(value)
                                             : std::isfinite(value));
    }
  }
  CAPTURE(static_cast<int>(kernel));
  CHECK(right);
}

TEST_CASE("the activation of a product of bf16 sees each stored element once", "[ops][gemm][bf16]") {
  const auto kernel = GENERATE(from_range(kernels()));
  const Case<sg::bf16> with{{130, 201, 1100}, {false, false, true, false}};
  const auto expected = product(kernel, with);
  auto c = with.base, y = with.base;
  auto gemm     = with.gemm(c, Stored::rows, Stored::rows);
  gemm.y        = y.data();
  gemm.activate = [](sg::bf16* before, sg::bf16* after, std::int64_t size) {
    for (std::int64_t i = 0; i < size; ++i) {
      after[i]  = sg::bf16(2 * sg::wide(before[i]));
      before[i] = sg::bf16(-sg::wide(before[i]));
    }
  };
  sg::gemm(gemm, kernel);
  bool right = true;
  for (std::int64_t i = 0; i < 130; ++i) {
    for (std::int64_t j = 0; j < 201; ++j) {
      const auto here  = static_cast<std::size_t>(i * with.stride + j);
      const float want = sg::wide(expected[here]);
      right            = right && sg::wide(y[here]) == 2 * want && sg::wide(c[here]) == -want;
    }
  }
  CAPTURE(static_cast<int>(kernel));
  CHECK(right);
}
