#include <algorithm>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <cstdint>
#include <functional>
#include <vector>

#include "ops/cpu/activation.hpp"
#include "ops/cpu/into.hpp"
#include "ops/cpu/norm.hpp"
#include "ops/cpu/optimizer.hpp"
#include "tests/support/elements.hpp"

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

template <class T>
void check_cuts(const std::function<T(std::int64_t)>& value) {
  const auto in_pieces = [&](std::int64_t piece) {
    return Sums<T>([&](const sg::Into<T>& into) {
      for (std::int64_t begin = 0; begin < count; begin += piece) {
        cpu::put(into, begin, std::min(piece, count - begin), [&](std::int64_t i) { return value(begin + i); });
      }
    });
  };
  const Sums<T> one_by_one = in_pieces(1);
  CHECK((one_by_one.in_place == one_by_one.onto));
  for (const std::int64_t piece : {7, 16, 67, 203}) {
    CAPTURE(piece);
    const Sums<T> found = in_pieces(piece);
    CHECK((found.alone == one_by_one.alone));
    CHECK((found.in_place == one_by_one.in_place));
    CHECK((found.onto == one_by_one.onto));
  }
}

}  // namespace

TEMPLATE_TEST_CASE("an activation's bits do not depend on where a loop is cut", "[ops][cpu]", float, double) {
  const auto x = numbers<TestType>(1), dy = numbers<TestType>(2);
  const auto check = [&]<class Function>(Function) {
    std::vector<TestType> whole(count), cut(count);
    for (std::size_t i = 0; i < count; ++i) whole[i] = Function::value(x[i]);
    for (std::size_t begin = 0; begin < count; begin += 7) {
      for (std::size_t i = begin; i < std::min<std::size_t>(count, begin + 7); ++i) cut[i] = Function::value(x[i]);
    }
    CHECK((whole == cut));
    check_cuts<TestType>([&](std::int64_t i) {
      const auto k = static_cast<std::size_t>(i);
      return dy[k] * Function::slope(x[k]);
    });
  };
  check(cpu::GeluTanh{});
  check(cpu::GeluExact{});
  check(cpu::Silu{});
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
        [&](const sg::Into<TestType>& into) { cpu::norm_weight_gradient(norm, into, rows, 0, width); }, width);
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
