#include "tests/support/ops/elements.hpp"

#include <array>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>

#include "engine/base/half.hpp"

namespace sg = stepgraph;
using sg::testing::decode;
using sg::testing::encode;

namespace {

std::uint16_t bits_of(sg::DType type, double value) {
  std::array<std::byte, 2> element{};
  encode(type, value, element.data());
  std::uint16_t bits;
  std::memcpy(&bits, element.data(), sizeof bits);
  return bits;
}

}  // namespace

TEST_CASE("16-bit floats have the values that their formats give them", "[support][elements]") {
  CHECK(bits_of(sg::DType::f16, 1) == 0x3c00);
  CHECK(bits_of(sg::DType::f16, -2) == 0xc000);
  CHECK(bits_of(sg::DType::f16, 65504) == 0x7bff);
  CHECK(bits_of(sg::DType::f16, 65520) == 0x7c00);           // half way to the next value: infinity
  CHECK(bits_of(sg::DType::f16, 1 + 1.0 / 2048) == 0x3c00);  // ties go to even
  CHECK(bits_of(sg::DType::f16, 1 + 3.0 / 2048) == 0x3c02);
  CHECK(bits_of(sg::DType::f16, std::ldexp(1, -24)) == 0x0001);  // the smallest positive value
  CHECK(bits_of(sg::DType::bf16, 1) == 0x3f80);
  CHECK(bits_of(sg::DType::bf16, 257) == 0x4380);  // a tie: 256, not 258
  CHECK(bits_of(sg::DType::bf16, 259) == 0x4382);
}

TEST_CASE("two ways to write 16-bit floats agree on every one of them", "[support][elements]") {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    std::array<std::byte, 2> element{};
    std::memcpy(element.data(), &half, sizeof half);
    const double f = decode(sg::DType::f16, element.data()), b = decode(sg::DType::bf16, element.data());
    const auto same = [](double x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); };
    if (!same(f, static_cast<float>(sg::f16::from_bits(half)))) FAIL("f16 " << bits << " decodes to " << f);
    if (!same(b, static_cast<float>(sg::bf16::from_bits(half)))) FAIL("bf16 " << bits << " decodes to " << b);
    // Each value, slightly more, and half way to the next.
    for (const double value :
         {f, f * (1 + std::ldexp(1, -11)), f * (1 + std::ldexp(1, -12)), b * (1 + std::ldexp(1, -9))}) {
      const auto x = static_cast<float>(value);
      if (std::isnan(x)) continue;
      if (bits_of(sg::DType::f16, x) != sg::f16(x).bits()) FAIL("f16 of " << x);
      if (bits_of(sg::DType::bf16, x) != sg::bf16(x).bits()) FAIL("bf16 of " << x);
    }
  }
}

TEST_CASE("reductions of elements run in order and round as their type does", "[support][elements]") {
  using Bytes      = std::vector<std::byte>;
  const auto bytes = [](float value) {
    Bytes made(sizeof value);
    encode(sg::DType::f32, value, made.data());
    return made;
  };
  const std::vector<Bytes> one_way{bytes(1e8f), bytes(-1e8f), bytes(1)}, other{bytes(1), bytes(1e8f), bytes(-1e8f)};
  CHECK(sg::testing::reduce_in_order(sg::DType::f32, sg::Reduction::sum, one_way) == bytes(1));
  CHECK(sg::testing::reduce_in_order(sg::DType::f32, sg::Reduction::sum, other) == bytes(0));
  CHECK(sg::testing::reduce_in_order(sg::DType::f32, sg::Reduction::max, other) == bytes(1e8f));
  const std::vector<Bytes> thirds{bytes(1), bytes(0), bytes(0)};
  CHECK(sg::testing::reduce_in_order(sg::DType::f32, sg::Reduction::average, thirds) == bytes(1.0f / 3));
  const std::vector<Bytes> u8{{std::byte{200}}, {std::byte{100}}};
  CHECK(sg::testing::reduce_in_order(sg::DType::u8, sg::Reduction::sum, u8) == Bytes{std::byte{44}});
}
