#include "ops/cpu/gemm/gemm.hpp"

#include <algorithm>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/ops/elements.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

namespace {

// Our kernels for one kind of processor that this machine has.
std::vector<sg::GemmKernel> panel_kernels() {
  std::vector<sg::GemmKernel> found;
  for (const auto kernel : {sg::GemmKernel::neon, sg::GemmKernel::sve, sg::GemmKernel::avx2, sg::GemmKernel::avx512}) {
    if (sg::has(kernel)) found.push_back(kernel);
  }
  return found;
}
std::vector<sg::GemmKernel> our_kernels() {
  std::vector<sg::GemmKernel> found = panel_kernels();
  found.push_back(sg::GemmKernel::own);
  return found;
}
std::vector<sg::GemmKernel> all_kernels() {
  std::vector<sg::GemmKernel> found = our_kernels();
  found.push_back(sg::GemmKernel::fastest);
  return found;
}

// The length of the blocks that such a kernel cuts k into.
std::int64_t block_of_k(sg::GemmKernel kernel, std::int64_t k) {
  const std::string_view name = kernel == sg::GemmKernel::fastest ? sg::gemm_library() : "";
  const bool neon             = kernel == sg::GemmKernel::neon || name == "neon";
  const bool sve              = kernel == sg::GemmKernel::sve || name == "sve";
  const std::int64_t longest = neon ? 512 : sve ? 256 : 128, blocks = (k + longest - 1) / longest;
  return ((k + blocks - 1) / blocks + 3) / 4 * 4;
}

template <class T>
std::vector<T> numbers(std::int64_t count, std::uint64_t seed, double range = 1) {
  std::vector<T> made(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < made.size(); ++i)
    made[i] = static_cast<T>(range * (static_cast<double>(sg::testing::mix(seed * 1'000'003 + i) >> 40) * 0x1p-23 - 1));
  return made;
}

// a: [m, k] and b: [k, n], each row-major or transposed.
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
std::vector<T> product(const Problem<T>& problem, sg::GemmKernel kernel = sg::GemmKernel::fastest) {
  std::vector<T> c(static_cast<std::size_t>(problem.m * problem.n), T{99});
  sg::gemm(problem.gemm({c.data(), nullptr, problem.m * problem.n}), kernel);
  return c;
}

// The larger one; NaN counts as the largest.
template <class T>
T worse(T worst, T error) {
  return error <= worst ? worst : std::isnan(error) ? std::numeric_limits<T>::infinity() : error;
}

template <class T>
double worst_error(const Problem<T>& problem, const std::vector<T>& c) {
  double worst = 0;
  for (std::int64_t i = 0; i < problem.m; ++i) {
    for (std::int64_t j = 0; j < problem.n; ++j) {
      const double found = static_cast<double>(c[static_cast<std::size_t>(i * problem.n + j)]);
      const double error = std::abs(problem.expected(i, j) - found);
      worst              = worse(worst, error);
    }
  }
  return worst;
}

template <class T>
void check_products() {
  const auto [m, n, k]    = GENERATE(table<std::int64_t, std::int64_t, std::int64_t>({{1, 1, 1},
                                                                                      {6, 12, 5},
                                                                                      {7, 13, 300},
                                                                                      {97, 5, 257},
                                                                                      {5, 200, 128},
                                                                                      {193, 100, 33},
                                                                                      {3, 4, 0},
                                                                                      {1, 700, 9},
                                                                                      {40, 700, 20},
                                                                                      {1200, 8, 3},
                                                                                      {19, 33, 1300}}));
  const bool a_transposed = GENERATE(false, true), b_transposed = GENERATE(false, true);
  const auto kernel = GENERATE(from_range(all_kernels()));
  CAPTURE(m, n, k, a_transposed, b_transposed, static_cast<int>(kernel));
  const Problem<T> problem{m, n, k, a_transposed, b_transposed};
  const std::vector<T> c = product(problem, kernel);
  CHECK(worst_error(problem, c) <
        std::numeric_limits<T>::epsilon() * static_cast<double>(k + 1));  // factors are below 1
}

}  // namespace

TEST_CASE("products of all sizes and transposes agree with three plain loops in f32", "[ops][gemm]") {
  check_products<float>();
}

TEST_CASE("products of all sizes and transposes agree with three plain loops in f64", "[ops][gemm]") {
  check_products<double>();
}

TEST_CASE("a product cut both ways agrees with three plain loops", "[ops][gemm]") {
  const auto kernel = GENERATE(from_range(all_kernels()));
  const Problem<float> problem{.m = 1001, .n = 1650, .k = 3};
  REQUIRE(sg::num_gemm_tiles(problem.m, problem.n, sg::GemmKernel::own) == 128);
  REQUIRE(sg::gemm_joined(problem.m, problem.n, sg::GemmKernel::own) == 32);
  CHECK(worst_error(problem, product(problem, kernel)) < std::numeric_limits<float>::epsilon() * 4);
}

TEST_CASE("our own kernels: an element's bits depend on its row, its column and k, not on its position in the matrix",
          "[ops][gemm]") {
  const auto kernel = GENERATE(from_range(our_kernels()));
  const Problem<float> whole{.m = 130, .n = 150, .k = 700};
  const std::vector<float> all = product(whole, kernel);
  for (const std::int64_t skip : {1, 5, 64, 129}) {
    // Only the rows and columns from `skip` on.
    const std::int64_t m = whole.m - skip, n = whole.n - skip;
    std::vector<float> part(static_cast<std::size_t>(m * n));
    sg::Gemm<float> gemm = whole.gemm({part.data(), nullptr, m * n});
    gemm.m = m, gemm.n = n, gemm.c_stride = n;
    gemm.a.data += skip * whole.k;
    gemm.b.data += skip;
    sg::gemm(gemm, kernel);
    bool same = true;
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j)
        same = same && part[static_cast<std::size_t>(i * n + j)] ==
                           all[static_cast<std::size_t>((i + skip) * whole.n + j + skip)];
    }
    CAPTURE(skip, static_cast<int>(kernel));
    CHECK(same);
  }
}

TEST_CASE("our own kernels: an element's bits do not depend on the layout of its operands", "[ops][gemm]") {
  const auto kernel = GENERATE(from_range(our_kernels()));
  const auto [m, n, k] =
      GENERATE(table<std::int64_t, std::int64_t, std::int64_t>({{37, 45, 1100}, {16, 28, 64}, {90, 70, 19}}));
  CAPTURE(static_cast<int>(kernel), m, n, k);
  const Problem<float> straight{m, n, k};
  Problem<float> turned{m, n, k, true, true};
  for (std::int64_t p = 0; p < k; ++p) {
    for (std::int64_t i = 0; i < m; ++i)
      turned.a[static_cast<std::size_t>(p * m + i)] = straight.a[static_cast<std::size_t>(i * k + p)];
    for (std::int64_t j = 0; j < n; ++j)
      turned.b[static_cast<std::size_t>(j * k + p)] = straight.b[static_cast<std::size_t>(p * n + j)];
  }
  CHECK(product(straight, kernel) == product(turned, kernel));
}

TEST_CASE("products of every small number of rows and columns write only those", "[ops][gemm]") {
  const auto kernel = GENERATE(from_range(all_kernels()));
  double worst      = 0;
  bool alone        = true;
  for (std::int64_t m = 1; m <= 17; m += 2) {
    for (std::int64_t n = 1; n <= 100; ++n) {
      const std::int64_t k = 1 + n % 6, stride = n + 3;
      const Problem<float> problem{m, n, k};
      const std::vector<float> base = numbers<float>((m + 1) * stride, 3), bias = numbers<float>(n, 4);
      std::vector<float> c = base;
      sg::Gemm<float> gemm = problem.gemm({c.data(), c.data(), m * stride});
      gemm.c_stride        = stride;
      gemm.bias            = bias.data();
      sg::gemm(gemm, kernel);
      for (std::int64_t i = 0; i <= m; ++i) {
        for (std::int64_t j = 0; j < stride; ++j) {
          const auto at = static_cast<std::size_t>(i * stride + j);
          if (i == m || j >= n) {
            alone = alone && c[at] == base[at];
          } else {
            const auto sum = problem.expected(i, j) + static_cast<double>(base[at] + bias[static_cast<std::size_t>(j)]);
            worst          = worse(worst, std::abs(sum - static_cast<double>(c[at])));
          }
        }
      }
    }
  }
  CAPTURE(static_cast<int>(kernel));
  CHECK(alone);
  CHECK(worst < std::numeric_limits<float>::epsilon() * 16);
}

TEST_CASE("neither operand needs a unit stride", "[ops][gemm]") {
  const auto kernel = GENERATE(from_range(all_kernels()));
  const Problem<float> dense{.m = 21, .n = 30, .k = 40};
  std::vector<float> a(dense.a.size() * 2), b(dense.b.size() * 3), c(21 * 30);
  for (std::size_t i = 0; i < dense.a.size(); ++i) a[2 * i] = dense.a[i];
  for (std::size_t i = 0; i < dense.b.size(); ++i) b[3 * i] = dense.b[i];
  sg::Gemm<float> gemm = dense.gemm({c.data(), nullptr, 21 * 30});
  gemm.a               = {a.data(), 2 * 40, 2};
  gemm.b               = {b.data(), 3 * 30, 3};
  sg::gemm(gemm, kernel);
  CAPTURE(static_cast<int>(kernel));
  CHECK(worst_error(dense, c) < std::numeric_limits<float>::epsilon() * 41);
}

TEST_CASE("a product's bits depend neither on the addresses of its operands nor on the order of its tiles",
          "[ops][gemm]") {
  const bool a_transposed = GENERATE(false, true), b_transposed = GENERATE(false, true);
  const auto [m, n, k] =
      GENERATE(table<std::int64_t, std::int64_t, std::int64_t>({{200, 300, 700}, {9, 31, 50}, {1, 64, 33}}));
  CAPTURE(a_transposed, b_transposed, m, n, k);
  const Problem<float> problem{m, n, k, a_transposed, b_transposed};
  const std::vector<float> expected = product(problem);
  for (const std::size_t shift : {1, 2, 3, 7}) {
    std::vector<float> a(shift, 5), b(2 * shift, 6), c(shift + expected.size(), 7);
    a.insert(a.end(), problem.a.begin(), problem.a.end());
    b.insert(b.end(), problem.b.begin(), problem.b.end());
    sg::Gemm<float> moved = problem.gemm({c.data() + shift, nullptr, m * n});
    moved.a.data = a.data() + shift, moved.b.data = b.data() + 2 * shift;
    for (std::int64_t tile = sg::num_gemm_tiles(m, n) - 1; tile >= 0; --tile) sg::gemm_tiles(moved, tile, tile + 1);
    CAPTURE(shift);
    CHECK(std::equal(expected.begin(), expected.end(), c.begin() + static_cast<std::ptrdiff_t>(shift)));
  }
}

TEMPLATE_TEST_CASE("tiles may be computed one by one or joined, in any pieces", "[ops][gemm]", float, double,
                   sg::bf16) {
  const auto kernel        = GENERATE(from_range(all_kernels()));
  const auto [m, n]        = GENERATE(table<std::int64_t, std::int64_t>({{1001, 1650}, {200, 300}, {1040, 90}}));
  constexpr std::int64_t k = 5;
  CAPTURE(static_cast<int>(kernel), m, n);
  std::vector<TestType> a, b;
  for (const float x : numbers<float>(m * k, 1)) a.push_back(TestType(x));
  for (const float x : numbers<float>(k * n, 2)) b.push_back(TestType(x));
  const std::int64_t tiles = sg::num_gemm_tiles<TestType>(m, n, kernel);
  REQUIRE(tiles > 1);
  const auto in_pieces = [&](std::int64_t of) {
    std::vector<TestType> c(static_cast<std::size_t>(m * n), TestType(99));
    const sg::Gemm<TestType> gemm{.m        = m,
                                  .n        = n,
                                  .k        = k,
                                  .a        = {a.data(), k, 1},
                                  .b        = {b.data(), n, 1},
                                  .c        = {c.data(), nullptr, m * n},
                                  .c_stride = n};
    sg::gemm_tiles(gemm, 0, 1, kernel);  // so that pieces may begin in the middle of a row
    for (std::int64_t first = 1; first < tiles; first += of)
      sg::gemm_tiles(gemm, first, std::min(first + of, tiles), kernel);
    return c;
  };
  const auto one_by_one = in_pieces(1);
  // All sizes up to 6, then about one and a half times as large each, and all tiles in one piece. Sanitized: four times
  // as large each.
  for (std::int64_t of = 2; of <= tiles;) {
    const auto joined = in_pieces(of);
    CHECK(std::memcmp(joined.data(), one_by_one.data(), joined.size() * sizeof(TestType)) == 0);
    const std::int64_t next = sg::testing::sanitized()            ? 4 * of
                              : of < 6 || sg::testing::runs_all() ? of + 1
                                                                  : of + of / 2;
    of                      = of < tiles ? std::min(next, tiles) : next;
  }
}

TEST_CASE("products of large matrices are cut into enough tiles for many threads, small ones not at all",
          "[ops][gemm]") {
  constexpr auto own = sg::GemmKernel::own;
  // The shapes of a step of 1024 rows with widths 256 and 512, and those of their weights.
  for (const std::int64_t width : {256, 512}) {
    for (const std::int64_t other : {width, 3 * width, 4 * width, 16 * width}) {
      for (const auto& [m, n] :
           {std::pair(std::int64_t{1024}, other), {std::int64_t{1024}, width}, {width, other}, {other, width}}) {
        CAPTURE(m, n);
        const std::int64_t tiles = sg::num_gemm_tiles(m, n, own), joined = sg::gemm_joined(m, n, own);
        CHECK(tiles >= (m * n > 256 * 256 ? 64 : 32));
        CHECK(tiles % joined == 0);
        CHECK(tiles / joined >= 2);  // also as one call for each of two threads
      }
    }
  }
  CHECK(sg::num_gemm_tiles(1024, 2048, own) / sg::gemm_joined(1024, 2048, own) == 4);
  CHECK(sg::num_gemm_tiles(1024, 2048, own) == 128);
  CHECK(sg::num_gemm_tiles<sg::bf16>(1024, 2048, own) == 64);
  CHECK(sg::num_gemm_tiles<sg::f16>(1024, 2048, own) == 64);
  CHECK(sg::num_gemm_tiles<double>(1024, 2048, own) == 64);
  CHECK(sg::num_gemm_tiles(16, 16) == 1);
  CHECK(sg::num_gemm_tiles(0, 16) == 0);
  CHECK(sg::num_gemm_tiles(16, 0) == 0);
}

TEST_CASE("kernels for one kind of processor fuse each product with its sum, and add blocks of k in order",
          "[ops][gemm]") {
  const auto kernel = GENERATE(from_range(our_kernels()));
  if (kernel == sg::GemmKernel::own) return;
  const auto [m, n, k]    = GENERATE(table<std::int64_t, std::int64_t, std::int64_t>(
      {{1, 1, 1},
       {13, 33, 9},
       {25, 270, 1030},
       {11, 31, 512},
       {37, 300, 513},
       {250, 40, 257},
       {9, 900, 20},
       {7, 1100, 300}}));
  const bool a_transposed = GENERATE(false, true), b_transposed = GENERATE(false, true);
  CAPTURE(m, n, k, a_transposed, b_transposed, static_cast<int>(kernel));
  const Problem<float> problem{m, n, k, a_transposed, b_transposed};
  const std::int64_t length = block_of_k(kernel, k);
  const sg::Gemm<float> of  = problem.gemm({});
  std::vector<float> expected;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (std::int64_t first = 0; first < k; first += length) {
        float part = 0;
        for (std::int64_t p = first; p < std::min(k, first + length); ++p) {
          part = std::fma(of.a.data[i * of.a.row_stride + p * of.a.col_stride],
                          of.b.data[p * of.b.row_stride + j * of.b.col_stride], part);
        }
        sum = first == 0 ? part : sum + part;
      }
      expected.push_back(sum);
    }
  }
  CHECK(product(problem, kernel) == expected);
}

TEST_CASE("large products start no threads", "[ops][gemm]") {
  const auto threads = [] {
    std::set<std::string> ids;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
      ids.insert(entry.path().filename());
    return ids;
  };
  const std::set<std::string> before = threads();
  (void)product(Problem<float>{.m = 1000, .n = 600, .k = 300});
  (void)product(Problem<double>{.m = 1000, .n = 600, .k = 300});
  // Threads of earlier tests may end meanwhile.
  for (const std::string& id : threads()) CHECK(before.contains(id));
}

TEST_CASE("a product is added to a base, in place or not, with the same bits; a bias to every row", "[ops][gemm]") {
  const auto kernel = GENERATE(from_range(all_kernels()));
  const Problem<float> problem{.m = 20, .n = 101, .k = 1600};
  const std::vector<float> alone = product(problem, kernel), base = numbers<float>(20 * 101, 3),
                           bias = numbers<float>(101, 4);
  std::vector<float> expected(alone.size()), in_place = base, elsewhere(alone.size(), -1), biased(alone.size(), -1);
  for (std::size_t i = 0; i < alone.size(); ++i) expected[i] = base[i] + alone[i];
  sg::gemm(problem.gemm({in_place.data(), in_place.data(), 20 * 101}), kernel);
  sg::gemm(problem.gemm({elsewhere.data(), base.data(), 20 * 101}), kernel);
  CHECK(in_place == elsewhere);
  const auto of_panels = panel_kernels();
  const bool by_panels = std::find(of_panels.begin(), of_panels.end(), kernel) != of_panels.end() ||
                         (!of_panels.empty() && sg::gemm_library() != "blis" && sg::gemm_library() != "openblas");
  if (kernel == sg::GemmKernel::own) {
    CHECK(in_place == expected);  // the sum is computed first, then added
  } else if (by_panels) {
    // 1600 is several blocks of k: the base is the first summand.
    std::vector<float> by_blocks = base, part(alone.size());
    const std::int64_t length    = block_of_k(kernel, 1600);
    for (std::int64_t first = 0; first < 1600; first += length) {
      sg::Gemm<float> block = problem.gemm({part.data(), nullptr, 20 * 101});
      block.a = from_col(block.a, first), block.b = from_row(block.b, first);
      block.k = std::min(length, 1600 - first);
      sg::gemm(block, kernel);
      for (std::size_t i = 0; i < part.size(); ++i) by_blocks[i] += part[i];
    }
    CHECK(in_place == by_blocks);
  } else {
    float worst = 0;
    for (std::size_t i = 0; i < alone.size(); ++i) worst = worse(worst, std::abs(in_place[i] - expected[i]));
    CHECK(worst < std::numeric_limits<float>::epsilon() * 1601);
  }

  sg::Gemm<float> with_bias = problem.gemm({biased.data(), nullptr, 20 * 101});
  with_bias.bias            = bias.data();
  sg::gemm(with_bias, kernel);
  for (std::size_t i = 0; i < alone.size(); ++i) expected[i] = alone[i] + bias[i % 101];
  CHECK(biased == expected);
  with_bias.c.base = with_bias.c.out = elsewhere.data();
  sg::gemm(with_bias, kernel);
  float worst = 0;
  for (std::size_t i = 0; i < alone.size(); ++i)
    worst = worse(worst, std::abs(elsewhere[i] - (in_place[i] + alone[i] + bias[i % 101])));
  CHECK(worst < std::numeric_limits<float>::epsilon() * 2 * 1602);
}

TEST_CASE("a product does not write between the rows of its result", "[ops][gemm]") {
  const Problem<double> problem{.m = 9, .n = 7, .k = 3};
  std::vector<double> wide(9 * 10, 5);
  sg::Gemm<double> gemm = problem.gemm({wide.data(), nullptr, 90});
  gemm.c_stride         = 10;
  sg::gemm(gemm);
  const std::vector<double> dense = product(problem);
  for (std::size_t i = 0; i < wide.size(); ++i) CHECK(wide[i] == (i % 10 < 7 ? dense[i / 10 * 7 + i % 10] : 5));
}

namespace {

template <class Half>
std::vector<Half> rounded(const std::vector<float>& from) {
  std::vector<Half> made;
  for (const float value : from) made.push_back(sg::narrow<Half>(value));
  return made;
}
template <class Half>
std::vector<float> widened(const std::vector<Half>& from) {
  std::vector<float> made;
  for (const Half value : from) made.push_back(sg::wide(value));
  return made;
}

}  // namespace

TEMPLATE_TEST_CASE("a product of 2-byte operands is computed in f32 and rounded at most once", "[ops][gemm]", sg::bf16,
                   sg::f16) {
  // Relative bound of one rounding.
  constexpr double once   = std::is_same_v<TestType, sg::bf16> ? 0x1p-8 : 0x1p-11;
  const bool a_transposed = GENERATE(false, true), b_transposed = GENERATE(false, true);
  const auto [m, n, k] = GENERATE(table<std::int64_t, std::int64_t, std::int64_t>(
      {{1, 1, 1}, {7, 13, 300}, {193, 100, 33}, {100, 120, 600}, {600, 20, 9}, {40, 500, 9}}));
  CAPTURE(a_transposed, b_transposed, m, n, k);
  Problem<float> wide{m, n, k, a_transposed, b_transposed};
  const std::vector<TestType> a = rounded<TestType>(wide.a), b = rounded<TestType>(wide.b),
                              bias = rounded<TestType>(numbers<float>(n, 4));
  wide.a = widened(a), wide.b = widened(b);
  const Problem<TestType> problem{m, n, k, a_transposed, b_transposed, a, b};
  const std::vector<float> base = numbers<float>(m * n, 3);
  std::vector<float> sum        = base;
  std::vector<TestType> c(sum.size());
  const sg::Gemm<TestType> into_half = problem.gemm({c.data(), nullptr, m * n});
  sg::Gemm<TestType> biased          = into_half;
  biased.bias                        = bias.data();
  sg::gemm(biased);
  sg::gemm(sg::Gemm<TestType, float>{
      .m = m, .n = n, .k = k, .a = into_half.a, .b = into_half.b, .c = {sum.data(), sum.data(), m * n}, .c_stride = n});
  double worst_wide = 0, worst_half = 0;
  for (std::size_t i = 0; i < c.size(); ++i) {
    const double exact = wide.expected(static_cast<std::int64_t>(i) / n, static_cast<std::int64_t>(i) % n);
    const double above = exact + static_cast<double>(sg::wide(bias[i % static_cast<std::size_t>(n)]));
    worst_wide         = worse(worst_wide, std::abs(sum[i] - (exact + static_cast<double>(base[i]))));
    worst_half = worse(worst_half, std::abs(static_cast<double>(sg::wide(c[i])) - above) - std::abs(above) * once);
  }
  const double summed = std::numeric_limits<float>::epsilon() * static_cast<double>(k + 2);
  CHECK(worst_wide < summed);
  CHECK(worst_half < summed * (1 + once));
}

TEST_CASE("an activation is applied to the stored result, in place or not", "[ops][gemm]") {
  const auto kernel = GENERATE(from_range(all_kernels()));
  const Problem<float> problem{.m = 130, .n = 101, .k = 60};
  const std::vector<float> bias = numbers<float>(101, 4);
  std::vector<float> before(130 * 101), after(before.size()), in_place(before.size());
  sg::Gemm<float> gemm = problem.gemm({before.data(), nullptr, 130 * 101});
  gemm.bias            = bias.data();
  sg::gemm(gemm, kernel);
  const std::vector<float> expected = before;
  gemm.activate                     = [](float* c, float* y, std::int64_t size) {
    for (std::int64_t i = 0; i < size; ++i) y[i] = 3 * c[i];
  };
  gemm.y = after.data();
  sg::gemm(gemm, kernel);
  CHECK(before == expected);
  gemm.c.out = gemm.y = in_place.data();
  sg::gemm(gemm, kernel);
  CHECK(in_place == after);
  for (std::size_t i = 0; i < after.size(); ++i) REQUIRE(after[i] == 3 * before[i]);
}

TEST_CASE("the factor of a product is applied to the stored result and has its layout", "[ops][gemm]") {
  const auto kernel    = GENERATE(from_range(all_kernels()));
  const std::int64_t k = GENERATE(60, 700);  // in one block of k, or in several
  const Problem<float> problem{.m = 130, .n = 101, .k = k};
  constexpr std::int64_t stride  = 107;
  const std::vector<float> times = numbers<float>(130 * stride, 5);
  std::vector<float> plain(times.size()), found(times.size());
  for (std::vector<float>* c : {&plain, &found}) {
    sg::Gemm<float> gemm = problem.gemm({c->data(), nullptr, 130 * stride});
    gemm.c_stride        = stride;
    gemm.times           = c == &found ? times.data() : nullptr;
    sg::gemm(gemm, kernel);
  }
  for (std::size_t i = 0; i < found.size(); ++i) REQUIRE(found[i] == plain[i] * times[i]);
  CHECK(found != plain);
}
