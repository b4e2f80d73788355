#include <bit>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include "ops/cpu/optimizer.hpp"
#include "tests/support/ops/elements.hpp"

// Updates on vectors of every kind have the bits of a plain loop with std::fma, which are those of a device.
namespace sg  = stepgraph;
namespace cpu = stepgraph::cpu;

namespace {

template <class Element>
std::vector<Element> numbers(std::uint64_t seed, std::int64_t count, double size = 1) {
  std::vector<Element> made;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t bits = sg::testing::mix(seed * 1'000'003 + static_cast<std::uint64_t>(i));
    const double number      = (static_cast<double>(bits >> 11) * 0x1p-52 - 1) * size;
    const double scaled      = bits % 16 == 0 ? number * 1e-12 : number;
    if constexpr (std::is_same_v<Element, double>) {
      made.push_back(scaled);
    } else {
      made.push_back(Element(static_cast<float>(scaled)));
    }
  }
  return made;
}

// A product that no compiler fuses with an addition.
template <class T>
[[gnu::noinline]] T product(T a, T b) {
  volatile T rounded = a * b;
  return rounded;
}

template <class T, class Gradient, class Value>
struct Arrays {
  std::vector<T> weight, first, second;
  std::vector<Gradient> gradient;
  std::vector<Value> value;

  explicit Arrays(std::int64_t count, bool valued)
      : weight(numbers<T>(1, count)),
        first(numbers<T>(2, count, 0.1)),
        second(numbers<T>(3, count, 0.1)),
        gradient(numbers<Gradient>(4, count)),
        value(valued ? static_cast<std::size_t>(count) : 0) {
    for (T& each : second) each *= each;
  }
  template <class Element>
  static auto rows(std::vector<Element>& of) {
    const auto count = static_cast<std::int64_t>(of.size());
    return sg::Rows<Element>{of.empty() ? nullptr : of.data(), count, count, 1};
  }
  [[nodiscard]] sg::Rows<const Gradient> gradients() const {
    const auto count = static_cast<std::int64_t>(gradient.size());
    return {gradient.data(), count, count, 1};
  }
  void round_values() {
    for (std::size_t i = 0; i < value.size(); ++i) value[i] = Value(static_cast<float>(weight[i]));
  }

  void adamw(const cpu::AdamWScalars& by, std::int64_t begin, std::int64_t end, cpu::Instructions instructions) {
    cpu::adamw<T, Gradient, Value>({rows(weight), rows(first), rows(second), gradients(), rows(value)}, by, begin, end,
                                   instructions);
  }
  void sgd(const cpu::SgdScalars& by, std::int64_t begin, std::int64_t end, cpu::Instructions instructions) {
    cpu::sgd<T, Gradient, Value>({rows(weight), rows(first), gradients(), rows(value)}, by, begin, end, instructions);
  }
  void adamw_by_hand(const cpu::AdamWScalars& by) {
    double power1 = 1, power2 = 1, square1 = by.beta1, square2 = by.beta2;
    for (std::int64_t steps = by.step; steps > 0; steps /= 2) {
      if (steps % 2 == 1) power1 = product(power1, square1), power2 = product(power2, square2);
      square1 = product(square1, square1);
      square2 = product(square2, square2);
    }
    const T factor = T(by.factor), keep = T(1 - product(by.rate, by.weight_decay)), new1 = T(1 - by.beta1),
            beta2 = T(by.beta2), new2 = T(1 - by.beta2), unroot2 = T(1 / std::sqrt(1 - power2)), eps = T(by.eps),
            size = T(by.rate / (1 - power1));
    for (std::size_t i = 0; i < weight.size(); ++i) {
      const T g         = product(static_cast<T>(gradient[i]), factor);
      const T m         = std::fma(g - first[i], new1, first[i]);
      const T v         = std::fma(product(new2, g), g, product(second[i], beta2));
      const T corrected = std::fma(std::sqrt(v), unroot2, eps);
      weight[i]         = std::fma(-size, m / corrected, product(weight[i], keep));
      first[i]          = m;
      second[i]         = v;
    }
    round_values();
  }
  void sgd_by_hand(const cpu::SgdScalars& by) {
    for (std::size_t i = 0; i < weight.size(); ++i) {
      const T decayed = product(T(by.weight_decay), weight[i]);
      const T pushed  = std::fma(T(by.factor), static_cast<T>(gradient[i]), decayed);
      first[i]        = std::fma(T(by.momentum), first[i], pushed);
      weight[i]       = std::fma(-T(by.rate), first[i], weight[i]);
    }
    round_values();
  }

  // The first element that differs in any bit, or -1.
  [[nodiscard]] std::int64_t differs(const Arrays& other) const {
    using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
    for (std::size_t i = 0; i < weight.size(); ++i) {
      const auto same = [i](const std::vector<T>& a, const std::vector<T>& b) {
        return std::bit_cast<Bits>(a[i]) == std::bit_cast<Bits>(b[i]);
      };
      if (!same(weight, other.weight) || !same(first, other.first) || !same(second, other.second) ||
          (!value.empty() && value[i].bits() != other.value[i].bits()))
        return static_cast<std::int64_t>(i);
    }
    return -1;
  }
};

}  // namespace

using AllTypes = std::tuple<std::tuple<double, double, sg::bf16>, std::tuple<float, float, sg::bf16>,
                            std::tuple<float, float, sg::f16>, std::tuple<float, sg::bf16, sg::bf16>,
                            std::tuple<float, sg::bf16, sg::f16>, std::tuple<float, sg::f16, sg::bf16>,
                            std::tuple<float, sg::f16, sg::f16>>;

TEMPLATE_LIST_TEST_CASE("updates have the bits of a plain loop with fused multiply-adds", "[ops][cpu][optimizer]",
                        AllTypes) {
  using T        = std::tuple_element_t<0, TestType>;
  using Gradient = std::tuple_element_t<1, TestType>;
  using Value    = std::tuple_element_t<2, TestType>;
  // Tails of every length, several vectors, and more than is rounded at a time.
  const std::int64_t count = GENERATE(1, 3, 8, 15, 31, 32, 33, 67, 203, 2047, 2048, 2049, 5000);
  const bool valued        = GENERATE(false, true);
  if (valued && std::is_same_v<T, double>) return;
  for (const cpu::Instructions instructions : cpu::all_instructions) {
    if (!cpu::has(instructions)) continue;
    CAPTURE(count, valued, static_cast<int>(instructions));
    Arrays<T, Gradient, Value> found(count, valued), expected(count, valued);
    for (const cpu::AdamWScalars& by :
         {cpu::AdamWScalars{1, 1e-3, 0.9, 0.999, 1e-8, 0.01, 1}, cpu::AdamWScalars{0.37, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3},
          cpu::AdamWScalars{1, 6e-4, 0.9, 0.95, 1e-8, 0.1, 12'345}}) {
      // In two pieces, so that vectors begin at other elements.
      found.adamw(by, 0, count / 3, instructions);
      found.adamw(by, count / 3, count, instructions);
      expected.adamw_by_hand(by);
      CHECK(found.differs(expected) == -1);
    }
    const cpu::SgdScalars by{0.7, 1e-2, 0.9, 0.1};
    found.sgd(by, 0, count, instructions);
    expected.sgd_by_hand(by);
    CHECK(found.differs(expected) == -1);
  }
}

TEST_CASE("powers of betas are those of a library up to a few roundings", "[ops][cpu][optimizer]") {
  for (const std::int64_t steps : {1, 2, 3, 10, 1000, 54'321, 10'000'000}) {
    const sg::BetaPowers powers(0.9, 0.999, steps);
    const double expected1 = std::pow(0.9, static_cast<double>(steps)),
                 expected2 = std::pow(0.999, static_cast<double>(steps));
    CAPTURE(steps);
    CHECK(std::abs(powers.of_beta1 - expected1) <= 1e-15);
    CHECK(std::abs(powers.of_beta2 - expected2) <= 1e-14);
  }
  constexpr sg::BetaPowers none(0.9, 0.999, 0);
  CHECK((none.of_beta1 == 1 && none.of_beta2 == 1));
}

TEST_CASE("the best instructions are some that the machine has", "[ops][cpu][optimizer]") {
  CHECK(cpu::has(cpu::Instructions::of_the_build));
  CHECK(cpu::has(cpu::best_instructions()));
  if (cpu::has(cpu::Instructions::avx512)) CHECK(cpu::has(cpu::Instructions::avx2));
}
