#include "ops/cpu/exact_squares.hpp"

#include <algorithm>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/updates/optimizer.hpp"

namespace sg = stepgraph;

namespace {

template <class T>
using Sum = std::vector<std::int64_t>;

template <class T>
void add(Sum<T>& sum, const std::vector<T>& values, std::size_t begin, std::size_t end) {
  const auto size = static_cast<std::int64_t>(values.size());
  sg::cpu::add_squares<T>({values.data(), std::max<std::int64_t>(size, 1), size, 1}, static_cast<std::int64_t>(begin),
                          static_cast<std::int64_t>(end), sum);
}

template <class T>
Sum<T> zero() {
  return Sum<T>(static_cast<std::size_t>(sg::cpu::exact_size<T>));
}

template <class T>
double squares_of(const std::vector<T>& values) {
  Sum<T> sum = zero<T>();
  add<T>(sum, values, 0, values.size());
  return sg::cpu::rounded<T>(sum);
}

}  // namespace

TEMPLATE_TEST_CASE("sums of squares are exact, and rounded once", "[ops][norm]", float, double) {
  using T = TestType;
  CHECK(squares_of<T>({}) == 0);
  CHECK(squares_of<T>({0, -0.0, 0}) == 0);
  CHECK(squares_of<T>({3, -4}) == 25);
  std::vector<T> numbers(60'060);  // more than fit into one histogram
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<T>(i);
  const double n = static_cast<double>(numbers.size()) - 1;
  CHECK(squares_of<T>(numbers) == n * (n + 1) * (2 * n + 1) / 6);
  const auto large = static_cast<T>(0x1p30);
  CHECK(squares_of<T>({large, 8, 8}) == 0x1p60);             // half a unit in the last place: to even
  CHECK(squares_of<T>({large, 8, 8, 1}) == 0x1p60 + 0x1p8);  // more than half
  CHECK(squares_of<T>({large, 8, 8, static_cast<T>(0x1p-60)}) == 0x1p60 + 0x1p8);
  CHECK(squares_of<T>({large, 16, 8, 8}) == 0x1p60 + 0x1p9);  // half a unit again: to even, upwards
}

TEST_CASE("squares of the smallest and the largest numbers are exact", "[ops][norm]") {
  const float least = std::numeric_limits<float>::denorm_min(), most = std::numeric_limits<float>::max();
  CHECK(squares_of<float>({least}) == 0x1p-298);
  CHECK(squares_of<float>(std::vector<float>(100'000, least)) == 100'000 * 0x1p-298);
  CHECK(squares_of<float>({3 * least, std::numeric_limits<float>::min()}) == 0x1p-252 + 9 * 0x1p-298);
  CHECK(squares_of<float>(std::vector<float>(70'000, most)) ==
        70'000 * static_cast<double>(most) * static_cast<double>(most));
  CHECK(squares_of<double>({std::numeric_limits<double>::max()}) == INFINITY);
  CHECK(squares_of<double>({0x1p-500, 0x1p-474}) == 0x1p-948 + 0x1p-1000);
  CHECK(squares_of<double>({std::numeric_limits<double>::denorm_min(), 1}) == 1);
  Sum<double> sum = zero<double>();
  add<double>(sum, {std::numeric_limits<double>::denorm_min()}, 0, 1);
  CHECK(sum.front() == 1);  // below the range of double, but exact
}

TEMPLATE_TEST_CASE("an infinity or a NaN among the elements makes the sum infinite or NaN", "[ops][norm]", float,
                   double) {
  using T     = TestType;
  const T inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  CHECK(squares_of<T>({1, -inf, 2}) == INFINITY);
  CHECK(std::isnan(squares_of<T>({1, nan, 2})));
  CHECK(std::isnan(squares_of<T>({-inf, nan})));
}

TEMPLATE_TEST_CASE("a sum of squares has the same bits for any order and split of its elements", "[ops][norm]", float,
                   double) {
  using T = TestType;
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> exponent(-60, 20);
  std::vector<T> values(50'021);
  for (T& value : values) value = static_cast<T>(std::ldexp(normal(random), exponent(random)));
  const double whole   = squares_of(values);
  long double expected = 0;
  for (const T value : values) expected += static_cast<long double>(value) * value;
  CHECK(std::abs(static_cast<double>(expected / whole) - 1) < 1e-12);
  for (int trial = 0; trial < 20; ++trial) {
    std::shuffle(values.begin(), values.end(), random);
    Sum<T> all = zero<T>();  // of several ranks, each with its own elements
    for (std::size_t begin = 0; begin < values.size();) {
      const std::size_t end = std::min(values.size(), begin + 1 + random() % 20'000);
      Sum<T> part           = zero<T>();
      add<T>(part, values, begin, end);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] += part[i];
      begin = end;
    }
    CHECK(sg::cpu::rounded<T>(all) == whole);
  }
}

TEST_CASE("squares added in parts have the sum of those added by exponent", "[ops][norm]") {
  using Sums = sg::cpu::SquareSums;
  struct Case {
    int lowest, highest;  // exponents
    float other;          // one element is this
  };
  // From one exponent to more than the parts hold; the ends of the range; numbers that are not finite.
  const Case test = GENERATE(Case{0, 0, 0}, Case{-20, -10, 0}, Case{-30, 0, 1}, Case{-45, 0, 1}, Case{-148, -140, 0},
                             Case{-149, -60, 0}, Case{120, 127, 0}, Case{-149, 127, 0}, Case{-3, 3, INFINITY},
                             Case{-3, 3, std::numeric_limits<float>::quiet_NaN()});
  CAPTURE(test.lowest, test.highest, test.other);
  std::mt19937 random(11);
  std::uniform_real_distribution<float> mantissa(1, 2);
  std::uniform_int_distribution<int> exponent(test.lowest, test.highest);
  for (const std::int64_t count : {1, 15, 16, 4095, 4096, 4097, 40'000}) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = std::ldexp(mantissa(random) * (random() % 2 ? 1 : -1), exponent(random));
    values[static_cast<std::size_t>(count / 2)] = test.other;
    const auto sum_of                           = [&](Sums how) {
      Sum<float> sum = zero<float>();
      sg::cpu::add_squares<float>({values.data(), count, count, 1}, 0, count, sum, how);
      return sum;
    };
    CHECK(sum_of(Sums::in_parts) == sum_of(Sums::by_exponent));
  }
}

namespace {

sg::Buffer kept(sg::Graph& graph, const std::string& name, std::int64_t elements, sg::DType type) {
  return graph.buffer({.name       = name,
                       .size_bytes = elements * static_cast<std::int64_t>(sg::size_bytes(type)),
                       .type       = type,
                       .lifetime   = sg::Lifetime::persistent});
}

}  // namespace

TEST_CASE("a norm covers all its sums, in rows or in one range, with any number of threads", "[ops][norm]") {
  const int threads        = GENERATE(1, 3);
  const std::int64_t count = 100'100, row = 1'001;
  sg::Graph graph;
  const sg::Buffer values = kept(graph, "values", count, sg::DType::f32),
                   sum    = kept(graph, "sum", sg::exact_sum_size(sg::DType::f32), sg::DType::i64),
                   norm = kept(graph, "norm", 1, sg::DType::f64), factor = kept(graph, "factor", 1, sg::DType::f64);
  // Every other row, then the rows between them.
  sg::square_sum(graph, {.name = "even", .values = values.strided(0, 4 * row, 8 * row, count / row / 2), .sum = sum});
  sg::square_sum(graph,
                 {.name = "odd", .values = values.strided(4 * row, 4 * row, 8 * row, count / row / 2), .sum = sum});
  sg::clip_factor(graph, {.squares = sum, .norm = norm, .factor = factor, .clip = 1});
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = threads});
  const sg::Program program(graph, world);
  const auto numbers = program.memory().span<float>(values);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::sin(static_cast<float>(i)) * 1e-3f;
  executor.run(program);
  const double expected = std::sqrt(squares_of(std::vector<float>(numbers.begin(), numbers.end())));
  CHECK(program.memory().span<double>(norm)[0] == expected);
}

TEST_CASE("the clip factor scales a large norm to the clip, and is 1 for smaller ones", "[ops][norm]") {
  struct Case {
    std::vector<float> values;
    double clip, norm, factor;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Case test =
      GENERATE_COPY(Case{{3, 4}, 1, 5, 1 / (5 + 1e-6)}, Case{{3, 4}, 0, 5, 1},   // clips; never clips
                    Case{{3, 4}, 10, 5, 1}, Case{{3, 4}, 5, 5, 5 / (5 + 1e-6)},  // a norm below the clip, and at it
                    Case{{0, 0, 0}, 1, 0, 1}, Case{{0}, 0, 0, 1}, Case{{}, 1, 0, 1},  // nothing to clip
                    Case{{nan, 1}, 1, nan, nan}, Case{{INFINITY, 1}, 1, INFINITY, nan},
                    Case{{INFINITY, 1}, 0, INFINITY, nan});  // no factor
  CAPTURE(test.values, test.clip);
  sg::Graph graph;
  const sg::Buffer squares = kept(graph, "squares", sg::exact_sum_size(sg::DType::f32), sg::DType::i64),
                   norm = kept(graph, "norm", 1, sg::DType::f64), factor = kept(graph, "factor", 1, sg::DType::f64);
  sg::clip_factor(graph, {.squares = squares, .norm = norm, .factor = factor, .clip = test.clip});
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = 1});
  const sg::Program program(graph, world);
  Sum<float> sum = zero<float>();
  add<float>(sum, test.values, 0, test.values.size());
  std::copy(sum.begin(), sum.end(), program.memory().span<std::int64_t>(squares).begin());
  executor.run(program);
  const double found_norm = program.memory().span<double>(norm)[0], found = program.memory().span<double>(factor)[0];
  CHECK((found_norm == test.norm || (std::isnan(found_norm) && std::isnan(test.norm))));
  CHECK((found == test.factor || (std::isnan(found) && std::isnan(test.factor))));
}
