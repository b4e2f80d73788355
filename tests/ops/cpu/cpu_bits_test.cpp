#include <algorithm>
#include <bit>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "ops/cpu/norm.hpp"
#include "ops/cpu/optimizer.hpp"
#include "ops/layers/activation.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/ops/op_case.hpp"

// An element's bits depend only on its operands: not on where a loop begins or ends (its tail is not a vector), nor on
// whether a sum is in place.
namespace sg  = stepgraph;
namespace cpu = stepgraph::cpu;

namespace {

constexpr std::int64_t count = 203;

template <class T>
std::vector<T> numbers(std::uint64_t seed, std::int64_t size = count) {
  std::vector<T> made;
  for (std::int64_t i = 0; i < size; ++i) {
    const auto bits = sg::testing::mix(seed * 1'000'003 + static_cast<std::uint64_t>(i)) >> 11;
    made.push_back(static_cast<T>(static_cast<double>(bits) * 0x1p-52 - 1));
  }
  return made;
}

// The results of `add`: without a base, in place, and with a base in another buffer.
template <class T>
struct Sums {
  std::vector<T> alone, in_place, onto;
  explicit Sums(const std::function<void(const sg::Into<T>&)>& add, std::int64_t size = count)
      : alone(static_cast<std::size_t>(size)), in_place(numbers<T>(9, size)), onto(static_cast<std::size_t>(size)) {
    const std::vector<T> base = in_place;
    add({alone.data(), nullptr, size});
    add({in_place.data(), in_place.data(), size});
    add({onto.data(), base.data(), size});
  }
};

// The arrays of an AdamW update.
template <class T>
struct Updated {
  std::vector<T> weight, first, second, gradient;
  void update(const cpu::AdamWScalars& scalars, std::int64_t begin, std::int64_t end) {
    const auto size = static_cast<std::int64_t>(weight.size());
    const auto rows = [size](auto& of) { return sg::Rows<T>{of.data(), size, 0, 1}; };
    cpu::adamw<T>({rows(weight), rows(first), rows(second), {gradient.data(), size, 0, 1}}, scalars, begin, end);
  }
  // The number of elements that differ; all NaNs count as equal.
  [[nodiscard]] int differs(const Updated& other) const {
    const auto differing = [](const std::vector<T>& a, const std::vector<T>& b) {
      using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
      int sum    = 0;
      for (std::size_t i = 0; i < a.size(); ++i) {
        if (std::isnan(a[i]) ? !std::isnan(b[i]) : std::bit_cast<Bits>(a[i]) != std::bit_cast<Bits>(b[i])) ++sum;
      }
      return sum;
    };
    return differing(weight, other.weight) + differing(first, other.first) + differing(second, other.second);
  }
};

}  // namespace

// The library's own loops: compares elements of a long tensor with those of shorter ones, whose tails are elsewhere.
TEST_CASE("an activation's bits do not depend on how many elements follow", "[ops][cpu]") {
  const auto type = GENERATE(sg::DType::f32, sg::DType::f64);
  const auto op   = GENERATE(0, 1, 2);
  CAPTURE(type, op);
  const auto of_length = [&](std::int64_t length) {
    sg::testing::OpCase test{.inputs = {{length}}};
    test.build = [op](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
      return op == 2 ? sg::silu(tape, in[0]) : sg::gelu(tape, in[0], op == 0 ? sg::Gelu::tanh : sg::Gelu::exact);
    };
    return std::pair(sg::testing::evaluate(test, type), sg::testing::gradients(test, type).inputs[0]);
  };
  const auto [values, gradients] = of_length(75);
  for (const std::int64_t length : {1, 2, 7, 16, 46, 67}) {
    CAPTURE(length);
    const auto [some_values, some_gradients] = of_length(length);
    CHECK(std::equal(some_values.begin(), some_values.end(), values.begin()));
    CHECK(std::equal(some_gradients.begin(), some_gradients.end(), gradients.begin()));
  }
}

TEMPLATE_TEST_CASE("a norm's gradient has the same bits in place and onto another buffer", "[ops][cpu]", float,
                   double) {
  constexpr std::int64_t rows = 7, width = 29;
  const auto x = numbers<TestType>(1), dy = numbers<TestType>(2), weight = numbers<TestType>(3, width),
             center = numbers<TestType>(4, rows), scale = numbers<TestType>(5, rows);
  for (const TestType* of : {center.data(), static_cast<const TestType*>(nullptr)}) {
    const cpu::NormBackward<TestType> norm{width, x.data(), weight.data(), of, scale.data(), dy.data()};
    const Sums<TestType> dx([&](const sg::Into<TestType>& into) { cpu::norm_backward(norm, into, 0, rows); });
    CHECK((dx.in_place == dx.onto));
    const Sums<TestType> dw(
        [&](const sg::Into<TestType>& into) {
          cpu::norm_weight_gradient<TestType>(norm, into, nullptr, rows, 0, width);
        },
        width);
    CHECK((dw.in_place == dw.onto));
  }
}

TEMPLATE_TEST_CASE("an update's bits do not depend on where a weight is cut", "[ops][cpu]", float, double) {
  using T                  = TestType;
  const auto after_updates = [](std::int64_t piece) {
    auto weight = numbers<T>(1), first = numbers<T>(2), second = numbers<T>(3);
    for (T& each : second) each *= each;
    const auto gradient = numbers<T>(4);
    const auto rows     = [](auto& of) { return sg::Rows<T>{of.data(), count, 0, 1}; };
    const sg::Rows<const T> of_gradient{gradient.data(), count, 0, 1};
    for (std::int64_t begin = 0; begin < count; begin += piece) {
      const std::int64_t end = std::min(count, begin + piece);
      cpu::adamw<T>({rows(weight), rows(first), rows(second), of_gradient}, {0.7, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3}, begin,
                    end);
      cpu::sgd<T>({rows(weight), rows(second), of_gradient}, {0.7, 1e-2, 0.9, 0.1}, begin, end);
    }
    return std::vector<std::vector<T>>{weight, first, second};
  };
  const auto one_by_one = after_updates(1);
  for (const std::int64_t piece : {7, 16, 67, 203}) {
    CAPTURE(piece);
    CHECK((after_updates(piece) == one_by_one));
  }
}

TEMPLATE_TEST_CASE("AdamW on vectors has the bits of AdamW on single elements", "[ops][cpu]", float, double) {
  using T      = TestType;
  using Limits = std::numeric_limits<T>;
  // All combinations, in an order in which each occurs at every vector lane.
  const std::vector<T> kinds{T(0),
                             T(-0.0),
                             Limits::denorm_min(),
                             Limits::min() / 3,
                             Limits::min(),
                             T(-1e-30),
                             T(1e-8),
                             T(-0.3),
                             T(1),
                             T(1) - Limits::epsilon(),
                             T(-3e18),
                             Limits::max(),
                             -Limits::max(),
                             Limits::infinity(),
                             -Limits::infinity(),
                             Limits::quiet_NaN()};
  Updated<T> before;
  const std::size_t num_kinds = kinds.size(), all = num_kinds * num_kinds * num_kinds * num_kinds;
  for (std::size_t i = 0; i < all; ++i) {
    const std::size_t mixed = i * 40'503 % all, at = mixed ^ mixed >> 7;  // a permutation of 2^16
    before.weight.push_back(kinds[at % num_kinds]);
    before.first.push_back(kinds[at / num_kinds % num_kinds]);
    before.second.push_back(kinds[at / num_kinds / num_kinds % num_kinds]);
    before.gradient.push_back(kinds[at / num_kinds / num_kinds / num_kinds]);
  }
  for (const cpu::AdamWScalars& scalars :
       {cpu::AdamWScalars{0.7, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3}, cpu::AdamWScalars{1, 1e-3, 0.5, 0.5, 0, 0, 1}}) {
    Updated<T> one_by_one = before, at_once = before;
    const auto size = static_cast<std::int64_t>(all);
    for (std::int64_t i = 0; i < size; ++i) one_by_one.update(scalars, i, i + 1);
    at_once.update(scalars, 0, size);
    CHECK(at_once.differs(one_by_one) == 0);
    CHECK(at_once.differs(before) > static_cast<int>(all));
  }
}

TEMPLATE_TEST_CASE("AdamW updates only the given elements", "[ops][cpu]", float, double) {
  using T = TestType;
  Updated<T> before{numbers<T>(1), numbers<T>(2), numbers<T>(3), numbers<T>(4)};
  for (T& each : before.second) each *= each;
  const cpu::AdamWScalars scalars{0.7, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3};
  for (const std::int64_t begin : {0, 3}) {
    Updated<T> expected = before;
    for (std::int64_t end = begin; end < count; ++end) {
      CAPTURE(begin, end);
      Updated<T> found = before;
      found.update(scalars, begin, end);
      REQUIRE(found.differs(expected) == 0);
      expected.update(scalars, end, end + 1);
    }
  }
}
