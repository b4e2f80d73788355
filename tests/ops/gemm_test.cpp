#include "ops/cpu/gemm.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/elements.hpp"

namespace sg = stepgraph;

namespace {

template <class T>
std::vector<T> numbers(std::int64_t count, std::uint64_t seed, double range = 1) {
  std::vector<T> made(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < made.size(); ++i)
    made[i] = static_cast<T>(range * (static_cast<double>(sg::testing::mix(seed * 1'000'003 + i) >> 40) * 0x1p-23 - 1));
  return made;
}

// a: [m, k] and b: [k, n], each as it is or lying transposed.
template <class T>
struct Problem {
  std::int64_t m, n, k;
  bool a_transposed = false, b_transposed = false;
  std::vector<T> a = numbers<T>(m * k, 1), b = numbers<T>(k * n, 2);

  [[nodiscard]] sg::Gemm<T> gemm(sg::Into<T> c) const {
    return {.m        = m,
            .n        = n,
            .k        = k,
            .a        = {a.data(), a_transposed ? 1 : k, a_transposed ? m : 1},
            .b        = {b.data(), b_transposed ? 1 : n, b_transposed ? k : 1},
            .c        = c,
            .c_stride = n};
  }
  [[nodiscard]] double expected(std::int64_t i, std::int64_t j) const {
    double sum = 0;
    for (std::int64_t p = 0; p < k; ++p) {
      const auto left  = static_cast<std::size_t>(a_transposed ? p * m + i : i * k + p);
      const auto right = static_cast<std::size_t>(b_transposed ? j * k + p : p * n + j);
      sum += static_cast<double>(a[left]) * static_cast<double>(b[right]);
    }
    return sum;
  }
};

template <class T>
std::vector<T> product(const Problem<T>& problem) {
  std::vector<T> c(static_cast<std::size_t>(problem.m * problem.n), T{99});
  sg::gemm(problem.gemm({c.data(), nullptr, problem.m * problem.n}));
  return c;
}

template <class T>
void check_products() {
  const auto [m, n, k]    = GENERATE(table<std::int64_t, std::int64_t, std::int64_t>(
      {{1, 1, 1}, {6, 12, 5}, {7, 13, 300}, {97, 5, 257}, {5, 200, 128}, {193, 100, 33}, {3, 4, 0}}));
  const bool a_transposed = GENERATE(false, true), b_transposed = GENERATE(false, true);
  CAPTURE(m, n, k, a_transposed, b_transposed);
  const Problem<T> problem{m, n, k, a_transposed, b_transposed};
  const std::vector<T> c = product(problem);
  double worst           = 0;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      const double error =
          std::abs(problem.expected(i, j) - static_cast<double>(c[static_cast<std::size_t>(i * n + j)]));
      worst = std::isnan(error) ? 1 : std::max(worst, error);
    }
  }
  CHECK(worst < std::numeric_limits<T>::epsilon() * static_cast<double>(k + 1));  // factors are below 1
}

}  // namespace

TEST_CASE("products of all sizes and transposes agree with three plain loops in f32", "[ops][gemm]") {
  check_products<float>();
}

TEST_CASE("products of all sizes and transposes agree with three plain loops in f64", "[ops][gemm]") {
  check_products<double>();
}

TEST_CASE("an element's bits depend on its row, its column and k, not on where in the matrix it lies", "[ops][gemm]") {
  const Problem<float> whole{.m = 130, .n = 150, .k = 700};
  const std::vector<float> all = product(whole);
  for (const std::int64_t skip : {1, 5, 64, 129}) {
    // Rows and columns from `skip` on, alone.
    const std::int64_t m = whole.m - skip, n = whole.n - skip;
    std::vector<float> part(static_cast<std::size_t>(m * n));
    sg::Gemm<float> gemm = whole.gemm({part.data(), nullptr, m * n});
    gemm.m = m, gemm.n = n, gemm.c_stride = n;
    gemm.a.data += skip * whole.k;
    gemm.b.data += skip;
    sg::gemm(gemm);
    bool same = true;
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j)
        same = same && part[static_cast<std::size_t>(i * n + j)] ==
                           all[static_cast<std::size_t>((i + skip) * whole.n + j + skip)];
    }
    CAPTURE(skip);
    CHECK(same);
  }
}

TEST_CASE("a product is added to what is there, in place or elsewhere, with the same bits; a bias to every row",
          "[ops][gemm]") {
  const Problem<float> problem{.m = 20, .n = 101, .k = 600};
  const std::vector<float> alone = product(problem), base = numbers<float>(20 * 101, 3), bias = numbers<float>(101, 4);
  std::vector<float> expected(alone.size()), in_place = base, elsewhere(alone.size(), -1), biased(alone.size(), -1);
  for (std::size_t i = 0; i < alone.size(); ++i) expected[i] = base[i] + alone[i];
  sg::gemm(problem.gemm({in_place.data(), in_place.data(), 20 * 101}));
  sg::gemm(problem.gemm({elsewhere.data(), base.data(), 20 * 101}));
  CHECK(in_place == expected);
  CHECK(elsewhere == expected);

  sg::Gemm<float> with_bias = problem.gemm({biased.data(), nullptr, 20 * 101});
  with_bias.bias            = bias.data();
  sg::gemm(with_bias);
  for (std::size_t i = 0; i < alone.size(); ++i) expected[i] = alone[i] + bias[i % 101];
  CHECK(biased == expected);
}

TEST_CASE("a product leaves what lies between the rows of its result alone", "[ops][gemm]") {
  const Problem<double> problem{.m = 9, .n = 7, .k = 3};
  std::vector<double> wide(9 * 10, 5);
  sg::Gemm<double> gemm = problem.gemm({wide.data(), nullptr, 90});
  gemm.c_stride         = 10;
  sg::gemm(gemm);
  const std::vector<double> dense = product(problem);
  for (std::size_t i = 0; i < wide.size(); ++i) CHECK(wide[i] == (i % 10 < 7 ? dense[i / 10 * 7 + i % 10] : 5));
}
