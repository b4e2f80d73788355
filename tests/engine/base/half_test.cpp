#include "engine/base/half.hpp"

#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstdint>
#include <limits>

#include "engine/base/types.hpp"
#include "tests/support/graphs/random_graph.hpp"

namespace sg = stepgraph;

namespace {

// A float format by its definition: `fraction` mantissa bits, exponents biased by `bias`.
struct Format {
  int fraction, bias;
  [[nodiscard]] int max_exponent() const { return (1 << (15 - fraction)) - 1; }
};
constexpr Format half{10, 15}, brain{7, 127};

double value_of(Format format, std::uint16_t bits) {
  const int exponent = (bits & 0x7fff) >> format.fraction, fraction = bits & ((1 << format.fraction) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == format.max_exponent())
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - format.bias - format.fraction);
  return sign * std::ldexp(fraction + (1 << format.fraction), exponent - format.bias - format.fraction);
}

// The nearest value, ties to even, by comparing the two neighbours. Bits of one sign are in the order of values, and
// infinity takes the place of the next value.
std::uint16_t nearest(Format format, float value) {
  const std::uint16_t sign     = std::signbit(value) ? 0x8000 : 0;
  const std::uint16_t infinity = static_cast<std::uint16_t>(format.max_exponent() << format.fraction);
  const double size            = std::abs(static_cast<double>(value));
  if (std::isinf(value)) return sign | infinity;
  const auto size_of = [&](std::uint16_t bits) {
    return bits < infinity ? value_of(format, bits) : std::ldexp(1.0, format.max_exponent() - format.bias);
  };
  std::uint16_t low = 0, high = infinity;  // low <= size; size < high or high is infinity
  while (high - low > 1) {
    const auto middle                      = static_cast<std::uint16_t>((low + high) / 2);
    (size_of(middle) <= size ? low : high) = middle;
  }
  const double below = size - size_of(low), above = size_of(high) - size;
  if (below == above) return sign | (low % 2 == 0 ? low : high);
  return sign | (below < above ? low : high);
}

template <class T>
void check_widening(Format format) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto from       = static_cast<std::uint16_t>(bits);
    const double expected = value_of(format, from);
    const auto got        = static_cast<float>(T::from_bits(from));
    const bool same =
        std::isnan(expected) ? std::isnan(got) : got == expected && std::signbit(got) == std::signbit(expected);
    if (!same) FAIL_CHECK("bits " << bits << " became " << got);
    // And back: every value rounds to itself.
    const std::uint16_t back = T(got).bits();
    if (std::isnan(expected) ? !std::isnan(static_cast<float>(T::from_bits(back))) : back != from)
      FAIL_CHECK("bits " << bits << " came back as " << back);
  }
}

template <class T>
void check_rounding(Format format, float value) {
  const std::uint16_t got = T(value).bits(), expected = nearest(format, value);
  if (got != expected) FAIL_CHECK(value << " became " << got << " instead of " << expected);
}

// Tests around every value and every midpoint of two: the midpoint itself, and the adjacent floats.
template <class T>
void check_all_roundings(Format format) {
  const int infinity = format.max_exponent() << format.fraction;
  for (int bits = 0; bits < infinity; ++bits) {
    const double low  = value_of(format, static_cast<std::uint16_t>(bits));
    const double high = bits + 1 < infinity ? value_of(format, static_cast<std::uint16_t>(bits + 1))
                                            : std::ldexp(1.0, format.max_exponent() - format.bias);
    for (const double at : {low, (low + high) / 2}) {
      const auto value = static_cast<float>(at);
      for (const float near :
           {value, std::nextafter(value, 0.0f), std::nextafter(value, std::numeric_limits<float>::infinity())}) {
        check_rounding<T>(format, near);
        check_rounding<T>(format, -near);
      }
    }
  }
}

}  // namespace

TEST_CASE("every f16 and every bf16 is the float that its bits define, and comes back", "[engine][half]") {
  check_widening<sg::f16>(half);
  check_widening<sg::bf16>(brain);
}

TEST_CASE("floats round to the nearest f16 and bf16, ties to even, at every border", "[engine][half]") {
  check_all_roundings<sg::f16>(half);
  check_all_roundings<sg::bf16>(brain);
  sg::testing::Random random(1);
  for (int i = 0; i < 200'000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random.below(std::uint64_t{1} << 32)));
    if (std::isnan(value)) {
      CHECK(std::isnan(static_cast<float>(sg::f16(value))));
      CHECK(std::isnan(static_cast<float>(sg::bf16(value))));
    } else {
      check_rounding<sg::f16>(half, value);
      check_rounding<sg::bf16>(brain, value);
    }
  }
}

TEST_CASE("a NaN with only low bits set stays NaN, and large floats become infinite", "[engine][half]") {
  const auto sly = std::bit_cast<float>(0x7f800001u);
  CHECK(std::isnan(static_cast<float>(sg::f16(sly))));
  CHECK(std::isnan(static_cast<float>(sg::bf16(sly))));
  CHECK(sg::f16(65519.0f).bits() == 0x7bff);
  CHECK(sg::f16(65520.0f).bits() == 0x7c00);
  CHECK(sg::bf16(std::numeric_limits<float>::max()).bits() == 0x7f80);
  CHECK(sg::f16(-0.0f).bits() == 0x8000);
  STATIC_CHECK(sg::dtype_of<sg::bf16>() == sg::DType::bf16);
  STATIC_CHECK(sg::dtype_of<sg::f16>() == sg::DType::f16);
  STATIC_CHECK(sizeof(sg::f16) == 2);
}
