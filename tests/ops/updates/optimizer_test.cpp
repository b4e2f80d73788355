#include "ops/updates/optimizer.hpp"

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/ops/elements.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

sg::Buffer kept(sg::Graph& graph, const char* name, std::int64_t count, sg::DType type) {
  return graph.buffer({.name       = name,
                       .size_bytes = count * static_cast<std::int64_t>(sg::size_bytes(type)),
                       .type       = type,
                       .lifetime   = sg::Lifetime::persistent});
}

// Between -1 and 1, exact in f32.
double number(std::uint64_t seed, std::size_t i) {
  const std::uint64_t bits = sg::testing::mix(seed * 1'000'003 + i) >> 44;
  return (static_cast<double>(bits) - 524'287.5) / 524'288;
}

// A weight of `count` elements that is updated for some steps. Buffers have room for strided rows.
struct Update {
  static constexpr std::int64_t count = 41'000;  // several tiles
  sg::Graph graph;
  sg::DType type;
  bool strided;
  sg::Buffer weight, gradient, first, second, factor, rate, step;
  std::unique_ptr<sg::Program> program;
  sg::LoopbackWorld world{1};
  sg::Executor executor{{.threads = 2}};

  Update(sg::DType of, bool rows) : type(of), strided(rows) {
    const std::int64_t size = strided ? 2 * count : count;
    weight                  = kept(graph, "weight", count, type);
    gradient                = kept(graph, "gradient", size, type);
    first                   = kept(graph, "first", size, type);
    second                  = kept(graph, "second", size, type);
    factor                  = kept(graph, "factor", 1, sg::DType::f64);
    rate                    = kept(graph, "rate", 1, sg::DType::f64);
    step                    = kept(graph, "step", 1, sg::DType::i64);
  }
  // A whole buffer, or every other row of 125 (or `row`) elements. Rows of different accesses end at different
  // elements.
  [[nodiscard]] sg::Access access(sg::Buffer buffer, std::int64_t row = 125) const {
    const auto element = static_cast<std::int64_t>(sg::size_bytes(type));
    return strided ? buffer.strided(row * element, row * element, 2 * row * element, count / row) : sg::Access(buffer);
  }
  void make() {
    sg::verify(graph);
    program = std::make_unique<sg::Program>(graph, world);
  }
  // Element i of the access.
  [[nodiscard]] std::byte* at(sg::Buffer buffer, std::int64_t i, std::int64_t row = 125) const {
    const std::int64_t place = strided && buffer != weight ? i / row * 2 * row + row + i % row : i;
    return program->memory().bytes(buffer).data() + place * static_cast<std::int64_t>(sg::size_bytes(type));
  }
};

}  // namespace

TEST_CASE("AdamW agrees with its paper and PyTorch", "[ops][optimizer]") {
  const auto type    = GENERATE(sg::DType::f32, sg::DType::f64);
  const bool strided = GENERATE(false, true);
  CAPTURE(type, strided);
  constexpr double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;
  Update update(type, strided);
  sg::adamw(update.graph, {.name         = "update",
                           .weight       = update.weight,
                           .gradient     = update.access(update.gradient),
                           .first        = update.access(update.first, 200),
                           .second       = update.access(update.second, 328),
                           .factor       = update.factor,
                           .rate         = update.rate,
                           .step         = update.step,
                           .beta1        = beta1,
                           .beta2        = beta2,
                           .eps          = eps,
                           .weight_decay = decay});
  update.make();
  const auto count = static_cast<std::size_t>(Update::count);
  std::vector<double> w(count), m(count), v(count);
  for (std::size_t i = 0; i < count; ++i) {
    w[i] = number(0, i);
    sg::testing::encode(type, w[i], update.at(update.weight, static_cast<std::int64_t>(i)));
  }
  for (int step = 1; step <= 10; ++step) {
    const double factor = step % 3 == 0 ? 1 : 0.25 * step, rate = 1e-2 / step;
    update.program->memory().span<double>(update.factor)[0]     = factor;
    update.program->memory().span<double>(update.rate)[0]       = rate;
    update.program->memory().span<std::int64_t>(update.step)[0] = step;
    for (std::size_t i = 0; i < count; ++i) {
      const double raw = i == 0 ? 0 : number(static_cast<std::uint64_t>(step), i), g = raw * factor;
      sg::testing::encode(type, raw, update.at(update.gradient, static_cast<std::int64_t>(i)));
      // torch.optim.AdamW, line by line.
      w[i] -= rate * decay * w[i];
      m[i]                     = beta1 * m[i] + (1 - beta1) * g;
      v[i]                     = beta2 * v[i] + (1 - beta2) * g * g;
      const double m_corrected = m[i] / (1 - std::pow(beta1, step)), v_corrected = v[i] / (1 - std::pow(beta2, step));
      w[i] -= rate * m_corrected / (std::sqrt(v_corrected) + eps);
    }
    update.executor.run(*update.program);
  }
  const double tolerance = type == sg::DType::f32 ? 1e-6 : 1e-14;
  double worst = 0, worst_m = 0, worst_v = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto k = static_cast<std::int64_t>(i);
    worst        = std::max(worst, std::abs(sg::testing::decode(type, update.at(update.weight, k)) - w[i]));
    worst_m      = std::max(worst_m, std::abs(sg::testing::decode(type, update.at(update.first, k, 200)) - m[i]));
    worst_v      = std::max(worst_v, std::abs(sg::testing::decode(type, update.at(update.second, k, 328)) - v[i]));
  }
  CHECK(worst < tolerance);
  CHECK(worst_m < tolerance);
  CHECK(worst_v < tolerance);
  if (strided) CHECK(update.program->memory().span<std::byte>(update.first)[0] == std::byte{0});  // between rows
}

TEST_CASE("AdamW refuses a step before the first", "[ops][optimizer][refuses]") {
  Update update(sg::DType::f32, false);
  sg::adamw(update.graph, {.name     = "update",
                           .weight   = update.weight,
                           .gradient = update.gradient,
                           .first    = update.first,
                           .second   = update.second,
                           .factor   = update.factor,
                           .rate     = update.rate,
                           .step     = update.step});
  update.make();
  CHECK_THROWS_MATCHES(update.executor.run(*update.program), sg::Error,
                       MessageMatches(ContainsSubstring("adamw: step 0 (steps count from 1)")));
}

TEST_CASE("SGD follows a velocity that accumulates gradients", "[ops][optimizer]") {
  const auto type       = GENERATE(sg::DType::f32, sg::DType::f64);
  const bool strided    = GENERATE(false, true);
  const double momentum = GENERATE(0.0, 0.9);
  CAPTURE(type, strided, momentum);
  constexpr double decay = 0.03;
  Update update(type, strided);
  sg::sgd(update.graph, {.name         = "update",
                         .weight       = update.weight,
                         .gradient     = update.access(update.gradient),
                         .velocity     = update.access(update.first, 200),
                         .factor       = update.factor,
                         .rate         = update.rate,
                         .momentum     = momentum,
                         .weight_decay = decay});
  update.make();
  const auto count = static_cast<std::size_t>(Update::count);
  std::vector<double> w(count), velocity(count);
  for (std::size_t i = 0; i < count; ++i) {
    w[i] = number(0, i);
    sg::testing::encode(type, w[i], update.at(update.weight, static_cast<std::int64_t>(i)));
  }
  for (int step = 1; step <= 10; ++step) {
    const double factor = 1.0 / step, rate = 0.1 + 0.01 * step;
    update.program->memory().span<double>(update.factor)[0] = factor;
    update.program->memory().span<double>(update.rate)[0]   = rate;
    for (std::size_t i = 0; i < count; ++i) {
      const double raw = number(static_cast<std::uint64_t>(step), i);
      sg::testing::encode(type, raw, update.at(update.gradient, static_cast<std::int64_t>(i)));
      velocity[i] = momentum * velocity[i] + raw * factor + decay * w[i];
      w[i] -= rate * velocity[i];
    }
    update.executor.run(*update.program);
  }
  double worst = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double found = sg::testing::decode(type, update.at(update.weight, static_cast<std::int64_t>(i)));
    worst              = std::max(worst, std::abs(found - w[i]));
  }
  CHECK(worst < (type == sg::DType::f32 ? 2e-6 : 1e-14));
}

TEST_CASE("optimizer ops refuse other sizes and types, and settings out of range", "[ops][optimizer][refuses]") {
  sg::Graph graph;
  const sg::Buffer a = kept(graph, "a", 4, sg::DType::f32), b = kept(graph, "b", 5, sg::DType::f32),
                   wide = kept(graph, "wide", 4, sg::DType::f64), half = kept(graph, "half", 4, sg::DType::bf16),
                   one = kept(graph, "one", 1, sg::DType::f64), step = kept(graph, "step", 1, sg::DType::i64),
                   c = kept(graph, "c", 4, sg::DType::f32), d = kept(graph, "d", 4, sg::DType::f32);
  const sg::AdamW good{
      .name = "w", .weight = a, .gradient = c, .first = d, .second = d, .factor = one, .rate = one, .step = step};
  const auto refuses = [&](const auto& change, const std::string& why) {
    sg::AdamW spec = good;
    change(spec);
    CHECK_THROWS_MATCHES(sg::adamw(graph, spec), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refuses([&](sg::AdamW& spec) { spec.gradient = b; },
          "adamw 'w': gradient has 20 bytes of f32, but weight has 16 of f32");
  refuses([&](sg::AdamW& spec) { spec.second = wide; }, "second has 32 bytes of f64");
  refuses([&](sg::AdamW& spec) { spec.weight = half; }, "weight is bf16 (f32 or f64)");
  refuses([&](sg::AdamW& spec) { spec.gradient = c.strided(0, 2, 4, 8); }, "gradient has ranges of 2 bytes");
  refuses([&](sg::AdamW& spec) { spec.rate = a; }, "rate has 16 bytes of f32 (one f64)");
  refuses([&](sg::AdamW& spec) { spec.step = one; }, "step has 8 bytes of f64 (one i64)");
  refuses([&](sg::AdamW& spec) { spec.beta2 = 1; }, "beta2 is 1 (0 or more, less than 1)");
  refuses([&](sg::AdamW& spec) { spec.weight_decay = -1; }, "weight_decay is -1 (0 or more)");
  refuses([&](sg::AdamW& spec) { spec.gradient = half.range(0, 6); },
          "adamw 'w': gradient has 6 bytes of bf16 (4 elements, like the weight)");
  refuses([&](sg::AdamW& spec) { spec.skip = one; }, "adamw 'w': skip has 8 bytes of f64 (one i64)");
  CHECK_THROWS_AS(sg::sgd(graph, {.name = "w", .weight = a, .gradient = b, .velocity = d, .factor = one, .rate = one}),
                  sg::Error);
  const sg::Buffer sum = kept(graph, "sum", sg::exact_sum_size(sg::DType::f32), sg::DType::i64);
  CHECK_THROWS_MATCHES(sg::square_sum(graph, {.name = "s", .values = step, .sum = sum}), sg::Error,
                       MessageMatches(ContainsSubstring("square_sum 's': values is i64 (f32, f64, bf16 or f16)")));
  CHECK_THROWS_MATCHES(sg::square_sum(graph, {.name = "s", .values = a, .sum = one}), sg::Error,
                       MessageMatches(ContainsSubstring("square_sum 's': sum has 8 bytes of f64 (20 of i64")));
  CHECK_THROWS_AS(sg::square_sum(graph, {.name = "s", .values = wide, .sum = sum}), sg::Error);  // f64 needs more limbs
  CHECK_THROWS_AS(sg::clip_factor(graph, {.squares = a, .norm = one, .factor = one}), sg::Error);
  CHECK_THROWS_AS(sg::clip_factor(graph, {.squares = sum, .norm = one, .factor = one, .clip = -1}), sg::Error);
  CHECK_THROWS_MATCHES(sg::clip_factor(graph, {.squares = sum, .norm = one, .factor = one, .scale = one}), sg::Error,
                       MessageMatches(ContainsSubstring("only one of scale and overflow is given (both, or neither)")));
}

TEMPLATE_TEST_CASE("a master copy is updated like any weight, and its value is the rounded master", "[ops][optimizer]",
                   sg::bf16, sg::f16) {
  const bool strided = GENERATE(false, true), is_adamw = GENERATE(false, true);
  CAPTURE(strided, is_adamw);
  const auto updated = [&](bool valued) {
    Update update(sg::DType::f32, strided);
    const sg::Buffer value = kept(update.graph, "value", 2 * Update::count, *sg::dtype_of<TestType>());
    const sg::Access rows  = value.strided(328 * 2, 328 * 2, 2 * 328 * 2, Update::count / 328);
    if (is_adamw) {
      sg::AdamW spec{.name     = "update",
                     .weight   = update.weight,
                     .gradient = update.access(update.gradient),
                     .first    = update.access(update.first, 200),
                     .second   = update.access(update.second, 328),
                     .factor   = update.factor,
                     .rate     = update.rate,
                     .step     = update.step};
      if (valued) spec.value = rows;
      sg::adamw(update.graph, spec);
    } else {
      sg::Sgd spec{.name     = "update",
                   .weight   = update.weight,
                   .gradient = update.access(update.gradient),
                   .velocity = update.access(update.first, 200),
                   .factor   = update.factor,
                   .rate     = update.rate,
                   .momentum = 0.5};
      if (valued) spec.value = rows;
      sg::sgd(update.graph, spec);
    }
    update.make();
    const auto weights   = update.program->memory().span<float>(update.weight);
    const auto gradients = update.program->memory().span<float>(update.gradient);
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(number(0, i));
    for (std::size_t i = 0; i < gradients.size(); ++i) gradients[i] = static_cast<float>(number(1, i));
    update.program->memory().span<double>(update.factor)[0]     = 0.7;
    update.program->memory().span<double>(update.rate)[0]       = 0.01;
    update.program->memory().span<std::int64_t>(update.step)[0] = 1;
    update.executor.run(*update.program);
    std::size_t wrong = 0;
    const auto values = update.program->memory().template span<TestType>(value);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const TestType found = values[i / 328 * 656 + 328 + i % 328];
      if (valued && found.bits() != TestType(weights[i]).bits()) ++wrong;
    }
    CHECK(wrong == 0);
    return std::vector<float>(weights.begin(), weights.end());
  };
  CHECK((updated(true) == updated(false)));
}

TEST_CASE("a value that does not fit its master is refused", "[ops][optimizer][refuses]") {
  sg::Graph graph;
  const sg::Buffer a = kept(graph, "a", 4, sg::DType::f32), b = kept(graph, "b", 4, sg::DType::f32),
                   wide = kept(graph, "wide", 4, sg::DType::f64), few = kept(graph, "few", 3, sg::DType::bf16),
                   half = kept(graph, "half", 4, sg::DType::bf16), one = kept(graph, "one", 1, sg::DType::f64);
  const auto refuses = [&](sg::Buffer weight, sg::Buffer value, const std::string& why) {
    const sg::Sgd spec{.name     = "w",
                       .weight   = weight,
                       .gradient = weight,
                       .velocity = weight,
                       .factor   = one,
                       .rate     = one,
                       .value    = value};
    CHECK_THROWS_MATCHES(sg::sgd(graph, spec), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refuses(a, few, "sgd 'w': value has 6 bytes of bf16 (4 elements of bf16 or f16, like the weight)");
  refuses(a, b, "value has 16 bytes of f32");
  refuses(wide, half, "a value with a weight of f64 (a weight of f32)");
}
