#include "engine/base/arithmetic.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "tests/support/graphs/random_graph.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::DType;
using sg::Reduction;
using sg::testing::Random;

namespace {

constexpr std::array all_reductions{Reduction::sum, Reduction::average, Reduction::min, Reduction::max,
                                    Reduction::product};

// The reduction of a list of values, by a plain loop. `Wide` is the compute type.
template <class T>
T plain(const std::vector<T>& values, Reduction reduction) {
  if constexpr (std::is_integral_v<T>) {
    T least = values[0], largest = values[0];
    std::uint64_t sum = 0, product = 1;
    for (const T value : values) {
      sum += static_cast<std::uint64_t>(value);
      least   = std::min(least, value);
      largest = std::max(largest, value);
      product *= static_cast<std::uint64_t>(value);
    }
    const auto wrapped = static_cast<std::int64_t>(sum);
    switch (reduction) {
      case Reduction::sum:
        return static_cast<T>(wrapped);
      case Reduction::average:
        return static_cast<T>(wrapped / static_cast<std::int64_t>(values.size()));
      case Reduction::min:
        return least;
      case Reduction::max:
        return largest;
      case Reduction::product:
        return static_cast<T>(product);
    }
    return 0;
  } else {
    using Wide = std::conditional_t<sizeof(T) == 2, float, T>;
    Wide total = static_cast<Wide>(values[0]);
    for (std::size_t i = 1; i < values.size(); ++i) {
      const auto next = static_cast<Wide>(values[i]);
      if (reduction == Reduction::product) total *= next;
      if (reduction == Reduction::sum || reduction == Reduction::average) total += next;
      if (reduction == Reduction::min)
        total = std::isnan(total) || std::isnan(next) ? total + next : std::min(total, next);
      if (reduction == Reduction::max)
        total = std::isnan(total) || std::isnan(next) ? total + next : std::max(total, next);
    }
    if (reduction == Reduction::average) total /= static_cast<Wide>(values.size());
    return static_cast<T>(total);
  }
}

// Random bits, or numbers of moderate size.
template <class T>
T any_value(Random& random, bool wild) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(wild ? random.below(~std::uint64_t{0}) : random.below(100));
  } else if constexpr (sizeof(T) == 2) {
    return wild ? T::from_bits(static_cast<std::uint16_t>(random.below(65536)))
                : T(static_cast<float>(random.between(-40, 40)) / 8);
  } else {
    if (wild && random.chance(3)) return std::numeric_limits<T>::quiet_NaN();
    return static_cast<T>(random.between(-1'000'000, 1'000'000)) / static_cast<T>(random.between(1, 1000));
  }
}

template <class T>
bool same(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return a == b;
  else {
    using Wide   = std::conditional_t<sizeof(T) == 2, float, T>;
    const auto x = static_cast<Wide>(a), y = static_cast<Wide>(b);
    return x == y || (std::isnan(x) && std::isnan(y));
  }
}

template <class T>
void check_type(DType type) {
  for (const Reduction reduction : all_reductions) {
    for (int seed = 0; seed < sg::testing::cases(60); ++seed) {
      CAPTURE(to_string(type), to_string(reduction), seed);
      Random random(static_cast<std::uint64_t>(seed));
      const auto n = static_cast<std::size_t>(random.between(1, 9));
      const auto count =
          static_cast<std::size_t>(random.chance(20) ? random.between(1000, 2500) : random.between(0, 40));
      const bool wild = random.chance(50);
      const auto odd  = static_cast<std::size_t>(random.between(0, 3));  // bytes: no alignment is required
      std::vector<std::vector<T>> values(n);
      std::vector<std::vector<std::byte>> memory(2 * n, std::vector<std::byte>(count * sizeof(T) + odd));
      std::vector<const std::byte*> in;
      for (std::size_t k = 0; k < n; ++k) {
        for (std::size_t i = 0; i < count; ++i) values[k].push_back(any_value<T>(random, wild));
        if (count > 0) std::memcpy(memory[k].data() + odd, values[k].data(), count * sizeof(T));
        in.push_back(memory[k].data() + odd);
      }
      // Some outputs are inputs, some are separate.
      std::vector<std::byte*> out;
      const std::size_t num_out =
          random.chance(50) ? n : static_cast<std::size_t>(random.between(1, static_cast<std::int64_t>(n)));
      const bool in_place = random.chance(50);
      for (std::size_t k = 0; k < num_out; ++k) out.push_back(memory[in_place ? k : n + k].data() + odd);
      sg::reduce(in, out, count * sizeof(T), type, reduction);
      for (std::size_t i = 0; i < count; ++i) {
        std::vector<T> column;
        for (std::size_t k = 0; k < n; ++k) column.push_back(values[k][i]);
        const T expected = plain(column, reduction);
        for (const std::byte* result : out) {
          T got;
          std::memcpy(&got, result + i * sizeof(T), sizeof(T));
          if (!same(got, expected)) FAIL("element " << i << " of " << n << " inputs");
        }
      }
    }
  }
}

template <class T>
std::span<std::byte> bytes(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

}  // namespace

TEST_CASE("every type and reduction equals a plain loop, in place or not, at any address", "[engine][arithmetic]") {
  check_type<std::uint8_t>(DType::u8);
  check_type<std::int32_t>(DType::i32);
  check_type<std::int64_t>(DType::i64);
  check_type<sg::f16>(DType::f16);
  check_type<sg::bf16>(DType::bf16);
  check_type<float>(DType::f32);
  check_type<double>(DType::f64);
}

namespace {

// The bits of min or max of some values, in every order of three of them.
template <class T, class Bits>
void check_extreme(DType type, Reduction reduction, std::vector<T> values, Bits expected) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  do {
    CAPTURE(to_string(type), to_string(reduction), order);
    std::vector<const std::byte*> in;
    for (const std::size_t i : order) in.push_back(reinterpret_cast<const std::byte*>(&values[i]));
    Bits at_once = 0;
    std::array<std::byte*, 1> out{reinterpret_cast<std::byte*>(&at_once)};
    sg::reduce(in, out, sizeof(T), type, reduction);
    CHECK(at_once == expected);
    std::vector<T> total{values[order[0]]};
    for (const std::size_t i : order) {
      std::vector<T> next{values[i]};
      sg::reduce_into(bytes(total), bytes(next), type, reduction);
    }
    CHECK(std::memcmp(total.data(), &expected, sizeof(T)) == 0);
  } while (std::next_permutation(order.begin(), order.end()));
}

template <class T, class Bits>
void check_extremes(DType type, Bits sign, Bits nan) {
  const T plus = T(0.0f), minus = T(-0.0f), one = T(1.0f);
  const T infinity = T(std::numeric_limits<float>::infinity());
  const T odd_nan  = std::bit_cast<T>(static_cast<Bits>(sign | nan | 5));  // with a sign and other bits
  check_extreme<T>(type, Reduction::min, {plus, minus, one}, sign);
  check_extreme<T>(type, Reduction::min, {plus, one, plus}, Bits{0});
  check_extreme<T>(type, Reduction::max, {minus, plus, minus}, Bits{0});
  check_extreme<T>(type, Reduction::max, {minus, minus}, sign);
  for (const Reduction reduction : {Reduction::min, Reduction::max}) {
    check_extreme<T>(type, reduction, {one, odd_nan, infinity}, nan);
    check_extreme<T>(type, reduction, {minus, odd_nan, odd_nan}, nan);
    check_extreme<T>(type, reduction, {odd_nan}, nan);
  }
}

}  // namespace

TEST_CASE("min and max tell zeros apart by their sign and have one NaN, in any order", "[engine][arithmetic]") {
  check_extremes<sg::f16>(DType::f16, std::uint16_t{0x8000}, std::uint16_t{0x7e00});
  check_extremes<sg::bf16>(DType::bf16, std::uint16_t{0x8000}, std::uint16_t{0x7fc0});
  check_extremes<float>(DType::f32, std::uint32_t{1} << 31, std::uint32_t{0x7fc00000});
  check_extremes<double>(DType::f64, std::uint64_t{1} << 63, std::uint64_t{0x7ff8} << 48);
}

TEST_CASE("halves are rounded once, at the end", "[engine][arithmetic]") {
  // 1 + 2^-8 + 2^-8 in bf16: rounded after each step it would stay 1.
  const auto one = sg::bf16(1.0f), little = sg::bf16(0.00390625f);
  std::vector<sg::bf16> a{one}, b{little}, c{little}, out(1);
  const std::array<const std::byte*, 3> in{bytes(a).data(), bytes(b).data(), bytes(c).data()};
  const std::array<std::byte*, 1> to{bytes(out).data()};
  sg::reduce(in, to, 2, DType::bf16, Reduction::sum);
  CHECK(static_cast<float>(out[0]) == 1.0078125f);
}

TEST_CASE("a reduction can be done step by step, and an average divided at its end", "[engine][arithmetic]") {
  std::vector<float> total{1, 2, 3}, next{10, 20, 30};
  sg::reduce_into(bytes(total), bytes(next), DType::f32, Reduction::average);
  CHECK(total == std::vector<float>{11, 22, 33});
  sg::divide(bytes(total), DType::f32, 2);
  CHECK(total == std::vector<float>{5.5, 11, 16.5});
  sg::reduce_into(bytes(total), bytes(next), DType::f32, Reduction::max);
  CHECK(total == std::vector<float>{10, 20, 30});
  std::vector<std::int32_t> negative{-7};
  sg::divide(bytes(negative), DType::i32, 2);
  CHECK(negative[0] == -3);
  std::vector<std::uint8_t> small{255};
  sg::divide(bytes(small), DType::u8, 2);
  CHECK(small[0] == 127);
}

TEST_CASE("partial elements and unequal sizes are refused", "[engine][arithmetic][refuses]") {
  std::vector<std::uint8_t> a(6), b(4);
  CHECK_THROWS_AS(sg::reduce_into(bytes(a), bytes(a), DType::f32, Reduction::sum), sg::Error);
  CHECK_THROWS_AS(sg::reduce_into(bytes(a), bytes(b), DType::u8, Reduction::sum), sg::Error);
  CHECK_THROWS_AS(sg::divide(bytes(a), DType::f32, 2), sg::Error);
  CHECK_THROWS_AS(sg::divide(bytes(b), DType::f32, 0), sg::Error);
  const auto no_reduction = static_cast<Reduction>(99);
  CHECK_THROWS_AS(sg::reduce_into(bytes(b), bytes(b), DType::f32, no_reduction), sg::Error);
}
