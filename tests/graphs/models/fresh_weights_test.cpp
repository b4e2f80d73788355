#include "graphs/models/fresh_weights.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;

namespace {

template <class T = double>
std::vector<T> draw(std::uint64_t seed, std::string_view tensor, std::int64_t first, std::size_t count,
                    double deviation = 1, int threads = 1) {
  std::vector<T> out(count);
  sg::fill_normal(seed, tensor, first, deviation, std::span(out), threads);
  return out;
}

// The correlation of two samples with mean 0 and deviation 1: about 1 / sqrt(n) if they are independent.
double correlation(std::span<const double> x, std::span<const double> y) {
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0) / static_cast<double>(x.size());
}

constexpr std::size_t many   = 200'000;
constexpr double many_sigmas = 5 / 447.2;  // five standard deviations of the mean of `many` elements

}  // namespace

TEST_CASE("a quantile has the requested share of the distribution below it", "[graphs][fresh_weights]") {
  const double root = std::sqrt(2.0);
  double worst      = 0;
  for (const double p : {0x1p-53, 1e-15, 1e-12, 1e-9, 1e-5, 0.01, 0.0749, 0.0751, 0.2, 0.4999, 0.5, 0.7, 0.92, 0.99}) {
    const double back = std::erfc(-sg::normal_quantile(p) / root) / 2;
    worst             = std::max(worst, std::abs(back / p - 1));
  }
  CHECK(worst < 2e-13);  // in the far tail p changes 70 times as fast as the quantile
  CHECK(sg::normal_quantile(0.5) == 0);
  CHECK(sg::normal_quantile(0.25) == -sg::normal_quantile(0.75));
  CHECK(std::abs(sg::normal_quantile(0.975) - 1.959963984540054) < 1e-14);
  CHECK(std::abs(sg::normal_quantile(1e-9) + 5.997807015007687) < 1e-13);
}

TEST_CASE("fresh weights are the same in every version", "[graphs][fresh_weights]") {
  // The numbers are from an independent program in another language. It uses exact fractions where the library uses
  // fused multiply-adds.
  CHECK(draw(0, "transformer.wte.weight", 0, 3) ==
        std::vector<double>{-0.5873876398920885, -0.1163574302983746, 1.105381671350823});
  CHECK(draw(7, "lm_head.weight", 1'000'000'007, 2, 0.02) ==
        std::vector<double>{0.00871166550534283, -0.029093799535760446});
}

TEST_CASE("an element does not depend on the requested range", "[graphs][fresh_weights]") {
  const auto whole = draw(3, "w", 0, 1000, 0.02);
  for (const std::int64_t first : {0, 1, 2, 63, 500, 998}) {
    for (const std::size_t count : {std::size_t{1}, std::size_t{2}}) {
      const auto part = draw(3, "w", first, count, 0.02);
      CHECK(std::equal(part.begin(), part.end(), whole.begin() + first));
    }
  }
  const auto tail = draw(3, "w", 17, 983, 0.02);
  CHECK(std::equal(tail.begin(), tail.end(), whole.begin() + 17));
  // Indices beyond 32 bits.
  const auto far = draw(3, "w", (std::int64_t{1} << 40) - 1, 2);
  CHECK(draw(3, "w", std::int64_t{1} << 40, 1)[0] == far[1]);
  CHECK(draw(3, "w", 0, 1)[0] != far[1]);
  // Enough elements for several threads.
  constexpr std::size_t large = 1'000'003;
  const auto all              = draw(3, "w", 0, large, 0.02, /*threads=*/5);
  for (const std::size_t first : {std::size_t{0}, std::size_t{131'072}, std::size_t{500'001}, large - 9}) {
    const auto part = draw(3, "w", static_cast<std::int64_t>(first), 9, 0.02);
    CHECK(std::equal(part.begin(), part.end(), all.begin() + static_cast<std::ptrdiff_t>(first)));
  }
  CHECK(std::count(all.begin(), all.end(), 0.0) == 0);  // every element was drawn
}

TEST_CASE("a float is the rounded double", "[graphs][fresh_weights]") {
  const auto doubles = draw<double>(5, "w", 11, 5000, 0.3);
  const auto floats  = draw<float>(5, "w", 11, 5000, 0.3);
  CHECK(std::equal(floats.begin(), floats.end(), doubles.begin(),
                   [](float x, double y) { return x == static_cast<float>(y); }));
}

TEST_CASE("elements are normal: mean, deviation, skew, kurtosis and shares", "[graphs][fresh_weights]") {
  auto x            = draw(1, "transformer.h.0.mlp.c_fc.weight", 0, many);
  const auto moment = [&](int power) {
    double sum = 0;
    for (const double value : x) sum += std::pow(value, power);
    return sum / static_cast<double>(x.size());
  };
  // The variances of x, x^2, x^3, x^4 are 1, 2, 15, 96.
  CHECK(std::abs(moment(1)) < many_sigmas);
  CHECK(std::abs(moment(2) - 1) < many_sigmas * std::sqrt(2.0));
  CHECK(std::abs(moment(3)) < many_sigmas * std::sqrt(15.0));
  CHECK(std::abs(moment(4) - 3) < many_sigmas * std::sqrt(96.0));
  // Kolmogorov-Smirnov: passed by all but one in 10^5 normal samples.
  std::ranges::sort(x);
  double distance = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double share = std::erfc(-x[i] / std::sqrt(2.0)) / 2 * static_cast<double>(many);
    distance =
        std::max({distance, std::abs(share - static_cast<double>(i)), std::abs(share - static_cast<double>(i + 1))});
  }
  CHECK(distance / std::sqrt(static_cast<double>(many)) < 2.5);
  CHECK(std::abs(draw(1, "w", 5, 1, 0.5)[0] / draw(1, "w", 5, 1)[0] - 0.5) == 0);
  CHECK(draw(1, "w", 0, 3, 0) == std::vector<double>{0, 0, 0});
}

TEST_CASE("adjacent elements, and those of similar names and seeds, are independent", "[graphs][fresh_weights]") {
  if (sg::testing::sanitized()) return;  // the test before draws as many
  const auto x    = draw(0, "transformer.h.0.attn.c_attn.weight", 0, many + 4096);
  const auto base = std::span(x).first(many);
  for (const std::size_t lag : {1, 2, 3, 4, 64, 192, 256, 4096}) {
    CAPTURE(lag);
    CHECK(std::abs(correlation(base, std::span(x).subspan(lag, many))) < many_sigmas);
  }
  for (const char* name : {"transformer.h.1.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weighu", "", "w"}) {
    CAPTURE(name);
    CHECK(std::abs(correlation(base, draw(0, name, 0, many))) < many_sigmas);
  }
  const std::string same = "transformer.h.0.attn.c_attn.weight";
  for (const std::uint64_t seed : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    CAPTURE(seed);
    CHECK(std::abs(correlation(base, draw(seed, same, 0, many))) < many_sigmas);
    CHECK(std::abs(correlation(base, draw(seed, same, 1, many))) < many_sigmas);
  }
  // No value occurs twice. Overlapping streams would repeat a run of values.
  auto all = draw(0, "a", 0, many);
  for (const char* name : {"b", "c", "d"}) {
    const auto more = draw(0, name, 0, many);
    all.insert(all.end(), more.begin(), more.end());
  }
  std::ranges::sort(all);
  CHECK(std::ranges::adjacent_find(all) == all.end());
}

TEST_CASE("impossible draws are refused", "[graphs][fresh_weights][refuses]") {
  CHECK_THROWS_MATCHES(draw(0, "w", -1, 1), sg::Error, Message("fresh weights: 'w': element -1 (0 or more)"));
  CHECK_THROWS_MATCHES(draw(0, "w", 0, 1, -0.5), sg::Error,
                       Message("fresh weights: 'w': a deviation of -0.5 (0 or more)"));
  CHECK_THROWS_AS(draw(0, "w", 0, 1, std::numeric_limits<double>::quiet_NaN()), sg::Error);
  CHECK_THROWS_AS(draw(0, "w", 0, 1, std::numeric_limits<double>::infinity()), sg::Error);
}
