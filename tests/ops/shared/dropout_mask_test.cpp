#include "ops/shared/dropout_mask.hpp"

#include <algorithm>
#include <array>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "tests/support/scale.hpp"

namespace sg = stepgraph;

namespace {

sg::DropoutMask mask(double rate, std::uint64_t key = 1, std::int64_t step = 0) {
  return sg::DropoutSite{.active = true, .rate = rate, .key = sg::derived_key(7, key)}.mask_at(step);
}

constexpr std::int64_t count = 1 << 18;

// The deviation of the agreement of two masks of rate 1/2 from its expectation, in sigmas.
double deviation(const std::function<bool(std::uint64_t)>& a, const std::function<bool(std::uint64_t)>& b) {
  std::int64_t same = 0;
  for (std::uint64_t e = 0; e < count; ++e) same += a(e) == b(e) ? 1 : 0;
  return (static_cast<double>(same) - count / 2.0) / std::sqrt(count / 4.0);
}

}  // namespace

TEST_CASE("a dropout keeps as many elements as its rate says", "[ops][dropout]") {
  const double rate        = GENERATE(0.001, 0.1, 0.3, 0.5, 0.9);
  const std::uint64_t from = GENERATE(std::uint64_t{0}, std::uint64_t{123'456'789}, (std::uint64_t{1} << 32) - 999);
  CAPTURE(rate, from);
  for (std::uint64_t key = 0; key < 4; ++key) {
    const sg::DropoutMask of = mask(rate, key);
    std::int64_t kept        = 0;
    for (std::uint64_t e = 0; e < count; ++e) kept += of.keeps(from + e) ? 1 : 0;
    CHECK(std::abs(static_cast<double>(kept) - count * (1 - rate)) < 4 * std::sqrt(count * rate * (1 - rate)));
  }
  CHECK(mask(rate).scale == 1 / (1 - rate));
}

TEST_CASE("masks of adjacent elements, of other sites, steps and high words are independent", "[ops][dropout]") {
  const sg::DropoutMask of = mask(0.5);
  const auto here          = [&](std::uint64_t e) { return of.keeps(e); };
  for (int bit = 0; bit < 40; ++bit) {
    if (sg::testing::sanitized() && bit % 8 != 0) continue;
    CAPTURE(bit);
    CHECK(std::abs(deviation(here, [&](std::uint64_t e) { return of.keeps(e + (std::uint64_t{1} << bit)); })) < 4.5);
  }
  for (const std::uint64_t distance : {3u, 5u, 7u, 50u, 100u, 127u, 257u, 768u, 1000u}) {
    CAPTURE(distance);
    CHECK(std::abs(deviation(here, [&](std::uint64_t e) { return of.keeps(e + distance); })) < 4.5);
  }
  for (std::uint64_t other = 1; other < 20; ++other) {
    CAPTURE(other);
    const sg::DropoutMask site = mask(0.5, 1 + other), step = mask(0.5, 1, static_cast<std::int64_t>(other));
    CHECK(std::abs(deviation(here, [&](std::uint64_t e) { return site.keeps(e); })) < 4.5);
    CHECK(std::abs(deviation(here, [&](std::uint64_t e) { return step.keeps(e); })) < 4.5);
  }
}

TEST_CASE("patterns of adjacent elements, and runs, are as frequent as those of a fair coin", "[ops][dropout]") {
  const std::uint64_t key    = GENERATE(1, 2, 3, 4);
  const std::uint64_t stride = GENERATE(1, 64, 128, 1000);  // within a row, and down a column
  const sg::DropoutMask of   = mask(0.5, key);
  CAPTURE(key, stride);
  // Words of eight adjacent elements: 256 kinds, so chi-square is 255 with a sigma of sqrt(2 * 255).
  std::vector<double> words(256);
  const std::int64_t drawn = count / 8;
  for (std::uint64_t w = 0; w < drawn; ++w) {
    std::size_t word = 0;
    for (std::uint64_t i = 0; i < 8; ++i) word = 2 * word + (of.keeps((8 * w + i) * stride) ? 1 : 0);
    words[word] += 1;
  }
  double chi_square = 0;
  for (const double each : words) chi_square += (each - drawn / 256.0) * (each - drawn / 256.0) / (drawn / 256.0);
  CHECK(std::abs(chi_square - 255) < 4.5 * std::sqrt(2 * 255.0));
  // Runs of 1, 2, ... 9, and 10 or more equal elements: half of them have length 1, a quarter 2, ...
  std::array<double, 10> runs = {};
  std::size_t length          = 1;
  double num_runs             = 0;
  for (std::uint64_t e = 1; e < count; ++e) {
    if (of.keeps(e * stride) == of.keeps((e - 1) * stride)) {
      ++length;
      continue;
    }
    runs[std::min<std::size_t>(length, 10) - 1] += 1;
    num_runs += 1;
    length = 1;
  }
  double of_runs = 0;
  for (std::size_t i = 0; i < 10; ++i) {
    const double expected = num_runs * std::exp2(-static_cast<double>(std::min<std::size_t>(i + 1, 9)));
    of_runs += (runs[i] - expected) * (runs[i] - expected) / expected;
  }
  CHECK(std::abs(of_runs - 9) < 4.5 * std::sqrt(2 * 9.0));
}

TEST_CASE("pieces of a mask equal the mask, also across a boundary of 2^32 elements", "[ops][dropout]") {
  const std::int64_t first = GENERATE(std::int64_t{5}, (std::int64_t{1} << 32) - 10, (std::int64_t{3} << 32) - 64);
  const sg::DropoutMask of = mask(0.3);
  std::vector<bool> found, expected;
  of.for_pieces(first, 64, [&](const sg::DropoutBlock& block, std::uint32_t low, std::int64_t begin, std::int64_t n) {
    CHECK(static_cast<std::size_t>(begin) == found.size());
    for (std::uint32_t i = 0; i < n; ++i) found.push_back(block.keeps(low + i));
  });
  for (std::int64_t i = 0; i < 64; ++i) expected.push_back(of.keeps(static_cast<std::uint64_t>(first + i)));
  CHECK(found == expected);
}

TEST_CASE("a dropout site without a name or with an invalid rate is refused", "[ops][dropout][refuses]") {
  sg::Graph graph;
  sg::WeightTable weights;
  const sg::Tape plain({.graph = &graph, .weights = &weights});
  const sg::Buffer step =
      graph.buffer({.name = "step", .size_bytes = 8, .type = sg::DType::i64, .lifetime = sg::Lifetime::persistent});
  const sg::Tape random({.graph = &graph, .weights = &weights, .random = {.step = step, .seed = 3}});
  for (const double rate : {-0.1, 1.0, 1.5, std::nan("")}) {
    CHECK_THROWS_AS(sg::dropout_site(plain, {.rate = rate, .site = "here"}), sg::Error);
  }
  CHECK_THROWS_AS(sg::dropout_site(plain, {.rate = 0.5}), sg::Error);
  CHECK_FALSE(sg::dropout_site(plain, {.rate = 0.5, .site = "here"}).active);
  CHECK_FALSE(sg::dropout_site(random, {.rate = 0, .site = "here"}).active);
  CHECK_FALSE(sg::dropout_site(random, {}).active);
  CHECK(sg::dropout_site(random, {.rate = 0.5, .site = "here"}).active);
  CHECK(sg::dropout_site(random, {.rate = 0.5, .site = "here"}).key !=
        sg::dropout_site(random, {.rate = 0.5, .site = "there"}).key);
}
