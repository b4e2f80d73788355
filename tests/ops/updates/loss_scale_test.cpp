#include "ops/updates/loss_scale.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <limits>
#include <memory>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/updates/optimizer.hpp"
#include "tests/support/ops/elements.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

// A graph of one rank with persistent buffers, which can be run.
struct Bench {
  sg::Graph graph;
  sg::LoopbackWorld world{1};
  sg::Executor executor{{.threads = 2}};
  std::unique_ptr<sg::Program> program;

  sg::Buffer kept(const char* name, std::int64_t count, sg::DType type) {
    return graph.buffer({.name       = name,
                         .size_bytes = count * static_cast<std::int64_t>(sg::size_bytes(type)),
                         .type       = type,
                         .lifetime   = sg::Lifetime::persistent});
  }
  void make() {
    sg::verify(graph);
    program = std::make_unique<sg::Program>(graph, world);
  }
  void run() { executor.run(*program); }
  template <class T>
  [[nodiscard]] T& number(sg::Buffer buffer) {
    return program->memory().span<T>(buffer)[0];
  }
  template <class T>
  [[nodiscard]] std::vector<T> all(sg::Buffer buffer) {
    const auto span = program->memory().span<T>(buffer);
    return {span.begin(), span.end()};
  }
};

float number(std::uint64_t seed, std::size_t i) {
  return static_cast<float>(static_cast<double>(sg::testing::mix(seed * 1'000'003 + i) >> 44) / 524'288 - 1);
}

}  // namespace

TEST_CASE("a skipped step halves the scale, growth_steps good steps in a row double it", "[ops][loss_scale]") {
  Bench bench;
  const bool dynamic        = GENERATE(false, true);
  const sg::Buffer overflow = bench.kept("overflow", 1, sg::DType::i64), scale = bench.kept("s", 1, sg::DType::f64),
                   good = bench.kept("good", 1, sg::DType::i64), updates = bench.kept("updates", 1, sg::DType::i64);
  sg::update_loss_scale(bench.graph, {.overflow     = overflow,
                                      .scale        = scale,
                                      .good_steps   = good,
                                      .num_updates  = updates,
                                      .dynamic      = dynamic,
                                      .growth_steps = 3});
  bench.make();
  bench.number<double>(scale) = 1024;
  std::vector<double> scales;
  std::vector<std::int64_t> counts;
  for (const int step : {0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1}) {
    bench.number<std::int64_t>(overflow) = step;
    bench.run();
    scales.push_back(bench.number<double>(scale));
    counts.push_back(bench.number<std::int64_t>(updates));
  }
  CHECK(counts == std::vector<std::int64_t>{1, 2, 2, 3, 4, 5, 6, 7, 8, 8, 8});
  if (dynamic) CHECK(scales == std::vector<double>{1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048, 1024, 512});
  if (!dynamic) CHECK(scales == std::vector<double>(11, 1024));
}

TEST_CASE("an update of an earlier step is counted when it is applied, and an empty set changes nothing",
          "[ops][loss_scale]") {
  Bench bench;
  const bool scales       = GENERATE(false, true);
  const sg::Buffer factor = bench.kept("factor", 1, sg::DType::f64), set = bench.kept("set", 1, sg::DType::f64),
                   scale = bench.kept("s", 1, sg::DType::f64), good = bench.kept("good", 1, sg::DType::i64),
                   updates = bench.kept("updates", 1, sg::DType::i64);
  sg::CountUpdate spec{.factor = factor, .set_scale = set, .num_updates = updates, .growth_steps = 2};
  if (scales) {
    spec.scale      = scale;
    spec.good_steps = good;
  }
  sg::count_update(bench.graph, spec);
  bench.make();
  bench.number<double>(scale) = 1024;
  std::vector<double> made;
  std::vector<std::int64_t> counts;
  struct Set {
    double factor, scale;
  };
  const double none = std::nan("");
  for (const Set& each : {Set{none, none}, Set{none, none}, Set{0.5, 1}, Set{none, 1}, Set{1, 1}, Set{1, 1}}) {
    bench.number<double>(factor) = each.factor;
    bench.number<double>(set)    = each.scale;
    bench.run();
    made.push_back(bench.number<double>(scale));
    counts.push_back(bench.number<std::int64_t>(updates));
  }
  CHECK(counts == std::vector<std::int64_t>{0, 0, 1, 1, 2, 3});
  CHECK(made == (scales ? std::vector<double>{1024, 1024, 1024, 512, 512, 1024} : std::vector<double>(6, 1024)));
}

TEST_CASE("norm and clip factor refer to unscaled gradients", "[ops][loss_scale]") {
  const auto type    = GENERATE(sg::DType::f32, sg::DType::bf16, sg::DType::f16);
  const double clip  = GENERATE(0.0, 0.5, 100.0);
  const double value = GENERATE(1.5, static_cast<double>(std::numeric_limits<float>::infinity()), std::nan(""));
  CAPTURE(type, clip, value);
  constexpr std::int64_t count = 40'001;
  Bench bench;
  const sg::Buffer values = bench.kept("values", count, type), scale = bench.kept("scale", 1, sg::DType::f64),
                   sum  = bench.kept("sum", sg::exact_sum_size(type), sg::DType::i64),
                   norm = bench.kept("norm", 1, sg::DType::f64), factor = bench.kept("factor", 1, sg::DType::f64),
                   overflow = bench.kept("overflow", 1, sg::DType::i64);
  sg::square_sum(bench.graph, {.name = "squares", .values = values, .sum = sum});
  sg::clip_factor(bench.graph,
                  {.squares = sum, .norm = norm, .factor = factor, .clip = clip, .scale = scale, .overflow = overflow});
  bench.make();
  bench.number<double>(scale) = 64;
  double squares              = 0;
  const auto bytes            = bench.program->memory().bytes(values);
  for (std::int64_t i = 0; i < count; ++i) {
    const double each = i == count - 1 ? value : number(3, static_cast<std::size_t>(i));
    std::byte* at     = bytes.data() + i * static_cast<std::int64_t>(sg::size_bytes(type));
    sg::testing::encode(type, each, at);
    squares += sg::testing::decode(type, at) * sg::testing::decode(type, at);
  }
  bench.run();
  const bool finite = std::isfinite(value);
  CHECK(bench.number<std::int64_t>(overflow) == !finite);
  CHECK(std::isfinite(bench.number<double>(norm)) == finite);
  CHECK(std::isnan(bench.number<double>(factor)) == !finite);
  if (!finite) return;
  const double expected = std::sqrt(squares) / 64;
  CHECK(std::abs(bench.number<double>(norm) - expected) < 1e-12 * expected);
  const double wanted = clip == 0 || clip / (expected + 1e-6) > 1 ? 1 : clip / (expected + 1e-6);
  CHECK(std::abs(bench.number<double>(factor) * 64 - wanted) < 1e-12);
}

TEST_CASE("an update with 2-byte gradients equals one with widened gradients", "[ops][loss_scale][optimizer]") {
  const auto type     = GENERATE(sg::DType::bf16, sg::DType::f16);
  const bool is_adamw = GENERATE(false, true), valued = GENERATE(false, true);
  CAPTURE(type, is_adamw, valued);
  constexpr std::int64_t count = 20'007;
  const auto updated           = [&](bool widened) {
    Bench bench;
    const sg::Buffer weight = bench.kept("weight", count, sg::DType::f32),
                     first  = bench.kept("first", count, sg::DType::f32),
                     second = bench.kept("second", count, sg::DType::f32), half = bench.kept("half", 2 * count, type),
                     wide  = bench.kept("wide", count, sg::DType::f32),
                     value = bench.kept("value", count, sg::DType::f16), one = bench.kept("one", 1, sg::DType::f64),
                     step = bench.kept("step", 1, sg::DType::i64);
    // Rows of 9 elements, 18 apart, so that they contain no whole vector.
    const sg::Access rows     = half.strided(0, 18, 36, count / 9);
    const sg::Access gradient = widened ? sg::Access(wide) : rows;
    if (is_adamw) {
      sg::AdamW spec{.name     = "w",
                               .weight   = weight,
                               .gradient = gradient,
                               .first    = first,
                               .second   = second,
                               .factor   = one,
                               .rate     = one,
                               .step     = step};
      if (valued) spec.value = value;
      sg::adamw(bench.graph, spec);
    } else {
      sg::Sgd spec{.name = "w", .weight = weight, .gradient = gradient, .velocity = first, .factor = one, .rate = one};
      if (valued) spec.value = value;
      sg::sgd(bench.graph, spec);
    }
    bench.make();
    bench.number<double>(one)        = 0.25;
    bench.number<std::int64_t>(step) = 3;
    for (std::size_t i = 0; i < count; ++i) {
      bench.program->memory().span<float>(weight)[i] = number(1, i);
      std::byte* at = bench.program->memory().bytes(half).data() + 2 * (i / 9 * 18 + i % 9);
      sg::testing::encode(type, static_cast<double>(number(2, i)), at);
      bench.program->memory().span<float>(wide)[i] = static_cast<float>(sg::testing::decode(type, at));
    }
    for (int times = 0; times < 3; ++times) bench.run();
    std::vector<float> found = bench.all<float>(weight);
    for (const sg::f16 each : bench.all<sg::f16>(value)) found.push_back(static_cast<float>(each));
    return found;
  };
  CHECK((updated(false) == updated(true)));
}

TEST_CASE("an update that is skipped, or whose factor is NaN, leaves every bit unchanged",
          "[ops][loss_scale][optimizer]") {
  const bool is_adamw = GENERATE(false, true), by_factor = GENERATE(false, true);
  CAPTURE(is_adamw, by_factor);
  Bench bench;
  constexpr std::int64_t count = 20'007;
  const sg::Buffer weight = bench.kept("weight", count, sg::DType::f32), first = bench.kept("f", count, sg::DType::f32),
                   second   = bench.kept("second", count, sg::DType::f32),
                   gradient = bench.kept("gradient", count, sg::DType::f32),
                   value = bench.kept("value", count, sg::DType::f16), one = bench.kept("one", 1, sg::DType::f64),
                   factor = bench.kept("factor", 1, sg::DType::f64), step = bench.kept("step", 1, sg::DType::i64),
                   skip = bench.kept("skip", 1, sg::DType::i64);
  if (is_adamw) {
    sg::adamw(bench.graph, {.name     = "w",
                            .weight   = weight,
                            .gradient = gradient,
                            .first    = first,
                            .second   = second,
                            .factor   = factor,
                            .rate     = one,
                            .step     = step,
                            .value    = value,
                            .skip     = skip});
  } else {
    sg::sgd(bench.graph, {.name     = "w",
                          .weight   = weight,
                          .gradient = gradient,
                          .velocity = first,
                          .factor   = factor,
                          .rate     = one,
                          .value    = value,
                          .skip     = skip});
  }
  bench.make();
  bench.number<double>(one) = 0.25;
  const auto floats         = [&](sg::Buffer buffer) { return bench.program->memory().span<float>(buffer); };
  for (std::size_t i = 0; i < count; ++i) {
    floats(weight)[i]                               = number(1, i);
    floats(first)[i]                                = number(2, i);
    floats(second)[i]                               = number(3, i) + 1;
    floats(gradient)[i]                             = i == 5 ? std::numeric_limits<float>::infinity() : number(4, i);
    bench.program->memory().span<sg::f16>(value)[i] = sg::f16(number(1, i));
  }
  const auto state = [&] {
    std::vector<float> found;
    for (const sg::Buffer buffer : {weight, first, second}) {
      for (const float each : bench.all<float>(buffer)) found.push_back(each);
    }
    for (const sg::f16 each : bench.all<sg::f16>(value)) found.push_back(static_cast<float>(each));
    return found;
  };
  const std::vector<float> before  = state();
  bench.number<std::int64_t>(skip) = by_factor ? 0 : 1;  // step 0 would be an error without skip
  bench.number<double>(factor)     = by_factor ? std::nan("") : 0.25;
  bench.run();
  CHECK((state() == before));
  bench.number<double>(factor)     = 0.25;
  bench.number<std::int64_t>(skip) = 0;
  bench.number<std::int64_t>(step) = 1;
  floats(gradient)[5]              = 0;
  bench.run();
  CHECK((state() != before));
}

TEST_CASE("an update of a loss scale refuses accesses of other types and sizes", "[ops][loss_scale][refuses]") {
  Bench bench;
  const sg::Buffer real = bench.kept("real", 1, sg::DType::f64), whole = bench.kept("whole", 1, sg::DType::i64);
  const sg::UpdateLossScale good{.overflow = whole, .scale = real, .good_steps = whole, .num_updates = whole};
  const auto refuses = [&](const auto& change, const std::string& why) {
    sg::UpdateLossScale spec = good;
    change(spec);
    CHECK_THROWS_MATCHES(sg::update_loss_scale(bench.graph, spec), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refuses([&](auto& spec) { spec.overflow = real; },
          "update_loss_scale 'loss scale': overflow has 8 bytes of f64 (one i64)");
  refuses([&](auto& spec) { spec.scale = whole; }, "scale has 8 bytes of i64 (one f64)");
  refuses([&](auto& spec) { spec.good_steps = real; }, "good_steps has 8 bytes of f64");
  refuses([&](auto& spec) { spec.num_updates = real; }, "num_updates has 8 bytes of f64");
  refuses([&](auto& spec) { spec.growth_steps = 0; }, "growth_steps is 0 (at least 1)");
  sg::CountUpdate count{.factor = real, .set_scale = real, .num_updates = whole, .scale = real};
  CHECK_THROWS_MATCHES(sg::count_update(bench.graph, count), sg::Error,
                       MessageMatches(ContainsSubstring("only one of scale and good_steps is given")));
  count.factor = whole;
  CHECK_THROWS_MATCHES(sg::count_update(bench.graph, count), sg::Error,
                       MessageMatches(ContainsSubstring("factor has 8 bytes of i64 (one f64)")));
}
