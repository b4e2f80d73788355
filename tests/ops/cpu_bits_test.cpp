#include <algorithm>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cstdint>
#include <functional>
#include <vector>

#include "ops/activation.hpp"
#include "ops/cpu/norm.hpp"
#include "ops/cpu/optimizer.hpp"
#include "tests/support/elements.hpp"
#include "tests/support/op_case.hpp"

// An element's bits depend on its operands alone: not on where a loop begins or ends (the last elements of a loop are
// no vector), nor on whether a sum is in place.
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

// What `add` puts into a sum: with nothing there before, in place, and onto another buffer.
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

}  // namespace

// The library's own loops: elements of a long tensor against those of shorter ones, whose ends are elsewhere.
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
