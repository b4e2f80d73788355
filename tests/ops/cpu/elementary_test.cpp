#include "ops/cpu/elementary.hpp"

#include <algorithm>
#include <bit>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstdint>
#include <limits>

namespace cpu = stepgraph::cpu;

namespace {
float exp2_of(float x) { return cpu::exp2(cpu::Vector<float>{} + x)[0]; }
float log2_of(float x) { return cpu::log2(cpu::Vector<float>{} + x)[0]; }
}  // namespace

TEST_CASE("powers of two of vectors are within 3 units in the last place", "[ops][cpu]") {
  double worst = 0;
  for (std::int32_t i = -126 * 4096; i <= 127 * 4096; ++i) {
    const float x         = static_cast<float>(i) / 4096 + 1e-5f;
    const double expected = std::exp2(static_cast<double>(x)), unit = std::exp2(std::floor(x) - 23);
    worst = std::max(worst, std::abs(exp2_of(x) - expected) / unit);
  }
  CHECK(worst < 3);
}

TEST_CASE("powers of two of vectors are exact for integers, 0 below the range and NaN for NaN", "[ops][cpu]") {
  for (int n = -126; n <= 127; ++n) CHECK(exp2_of(static_cast<float>(n)) == std::ldexp(1.0f, n));
  for (const float x : {-127.0f, -150.0f, -1e4f, -1e10f, -1e30f, -std::numeric_limits<float>::infinity()}) {
    CHECK(exp2_of(x) == 0);
  }
  CHECK(std::isnan(exp2_of(std::nanf(""))));
  CHECK(std::isnan(exp2_of(std::nanf("1234567"))));
}

TEST_CASE("logarithms of vectors to base 2 are within 2 units in the last place", "[ops][cpu]") {
  double worst = 0;
  for (std::uint32_t bits = 0x00800000; bits < 0x7f800000; bits += 4099) {  // positive normal numbers
    const auto x          = std::bit_cast<float>(bits);
    const double expected = std::log2(static_cast<double>(x));
    const double unit     = std::exp2(std::floor(std::log2(std::max(std::abs(expected), 0x1p-24))) - 23);
    worst                 = std::max(worst, std::abs(log2_of(x) - expected) / unit);
  }
  CHECK(worst < 2);
}

TEST_CASE("logarithms of vectors to base 2 are exact for powers of two, and NaN for NaN", "[ops][cpu]") {
  for (int n = -126; n <= 127; ++n) CHECK(log2_of(std::ldexp(1.0f, n)) == static_cast<float>(n));
  CHECK(std::isnan(log2_of(std::nanf(""))));
}
