#include "ops/layers/cross_entropy.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>

#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

sg::testing::OpCase loss_case(std::int64_t columns, std::vector<std::int32_t> targets, double scale = 1,
                              bool in_place = false) {
  return {.inputs = {{static_cast<std::int64_t>(targets.size()), columns}},
          .tokens = std::move(targets),
          .build =
              [scale, in_place](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                const sg::Tensor loss = tape.tensor("loss", {1}, sg::DType::f64);
                sg::cross_entropy(
                    tape, {.logits = in[0], .targets = in[1], .loss = loss, .scale = scale, .in_place = in_place});
                return loss;
              },
          .loss_scale = scale,
          .in_place   = in_place};
}

// -log(exp(x_t) / sum exp(x)), in long double and without protection against overflow.
double plain(const std::vector<double>& logits, const std::vector<std::int32_t>& targets) {
  const std::size_t columns = logits.size() / targets.size();
  long double loss          = 0;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    long double sum = 0;
    for (std::size_t j = 0; j < columns; ++j) sum += std::exp(static_cast<long double>(logits[i * columns + j]));
    loss += std::log(sum) - static_cast<long double>(logits[i * columns + static_cast<std::size_t>(targets[i])]);
  }
  return static_cast<double>(loss);
}

}  // namespace

TEST_CASE("cross-entropy is the sum of -log softmax at the targets", "[ops][cross_entropy]") {
  std::vector<std::int32_t> targets(GENERATE(1, 3, 40));
  for (std::size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<std::int32_t>(i * 5 % 11);
  auto test             = loss_case(11, targets);
  test.range            = GENERATE(1.0, 50.0, 1000.0);  // exp(1000) overflows double
  const double expected = plain(sg::testing::values(test).inputs[0], targets);
  CHECK(std::abs(sg::testing::evaluate(test)[0] - expected) < 1e-14 * std::abs(expected));
  CHECK(std::abs(sg::testing::evaluate(test, sg::DType::f32)[0] - expected) < 1e-6 * std::abs(expected));
}

TEST_CASE("cross-entropy's gradient is correct, times its scale", "[ops][cross_entropy]") {
  sg::testing::check_gradients(loss_case(7, {0, 6, 3, 3}, GENERATE(1.0, 0.125)));
}

TEST_CASE("cross-entropy's gradient in place of the logits has the same bits", "[ops][cross_entropy]") {
  const auto type = GENERATE(sg::DType::f32, sg::DType::f64, sg::DType::bf16, sg::DType::f16);
  CAPTURE(type);
  std::vector<std::int32_t> targets(37);
  for (std::size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<std::int32_t>(i * 53 % 700);
  const auto apart = loss_case(700, targets, 0.25), in_place = loss_case(700, targets, 0.25, true);
  CHECK(sg::testing::evaluate(in_place, type) == sg::testing::evaluate(apart, type));
  CHECK((sg::testing::gradients(in_place, type).inputs == sg::testing::gradients(apart, type).inputs));
}

TEST_CASE("cross-entropy in place is correct, and one node", "[ops][cross_entropy]") {
  sg::testing::check_gradients(loss_case(7, {0, 6, 3, 3}, 0.5, true));
  sg::Graph graph;
  sg::WeightTable weights;
  sg::Tape tape({.graph = &graph, .weights = &weights});
  const sg::Tensor logits = tape.tensor("logits", {3, 4}), targets = tape.tensor("targets", {3}, sg::DType::i32),
                   loss = tape.tensor("loss", {1}, sg::DType::f64);
  sg::cross_entropy(tape, {.logits = logits, .targets = targets, .loss = loss, .in_place = true});
  tape.emit_gradients();
  CHECK(graph.num_nodes() == 1);
  CHECK(tape.gradient(logits).buffer == logits.buffer);
  CHECK(tape.owns_gradient(logits));
}

TEST_CASE("cross-entropy in bf16 and f16 equals that in f32 for the same logits", "[ops][cross_entropy]") {
  sg::testing::check_halves(loss_case(300, {0, 6, 299, 3}, 1, GENERATE(false, true)));
}

TEST_CASE("a loss scale read from a buffer multiplies the gradient of cross-entropy, not the loss",
          "[ops][cross_entropy]") {
  const auto type     = GENERATE(sg::DType::f32, sg::DType::f64, sg::DType::bf16, sg::DType::f16);
  const bool in_place = GENERATE(false, true);
  CAPTURE(type, in_place);
  const auto plain = loss_case(700, {3, 699, 0}, 0.5, in_place);
  auto scaled      = plain;
  scaled.build     = [in_place](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    const sg::Tensor loss = tape.tensor("loss", {1}, sg::DType::f64), scale = tape.tensor("s", {1}, sg::DType::f64);
    tape.add({.op = "scale", .writes = scale}, [](const sg::Context& context) { context.write<double>()[0] = 64; });
    sg::cross_entropy(
            tape,
            {.logits = in[0], .targets = in[1], .loss = loss, .scale = 0.5, .in_place = in_place, .loss_scale = scale});
    return loss;
  };
  CHECK(sg::testing::evaluate(scaled, type) == sg::testing::evaluate(plain, type));
  std::vector<double> expected = sg::testing::gradients(plain, type).inputs[0];
  const auto found             = sg::testing::gradients(scaled, type).inputs[0];
  REQUIRE(found.size() == expected.size());
  // 64 is a power of two: the same bits, except for subnormals of f16.
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (type == sg::DType::f16 && std::abs(expected[i]) < 0x1p-14) continue;
    REQUIRE(found[i] == 64 * expected[i]);
  }
}

TEST_CASE("logits too large for exp give finite losses and gradients", "[ops][cross_entropy]") {
  auto test        = loss_case(5, {0, 4});
  test.range       = 1e4;
  const auto found = sg::testing::gradients(test, sg::DType::f32);
  CHECK(std::all_of(found.inputs[0].begin(), found.inputs[0].end(), [](double each) { return std::isfinite(each); }));
  CHECK(std::isfinite(sg::testing::evaluate(test, sg::DType::f32)[0]));
}

namespace {

// A mean over the targets that count.
sg::testing::OpCase mean_case(std::int64_t columns, const std::vector<std::int32_t>& targets, bool in_place,
                              bool scaled) {
  auto test  = loss_case(columns, targets, 1, in_place);
  test.build = [in_place, scaled, all = std::ssize(targets),
                ignored = std::count(targets.begin(), targets.end(), sg::ignored_target)](
                   sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    const sg::Tensor loss = tape.tensor("loss", {1}, sg::DType::f64), scale = tape.tensor("s", {1}, sg::DType::f64),
                     number = tape.tensor("n", {1}, sg::DType::i64);
    tape.add({.op = "set", .writes = {scale, number}}, [ignored](const sg::Context& context) {
      context.write<double>(0)[0]       = 64;
      context.write<std::int64_t>(1)[0] = ignored;
    });
    sg::CrossEntropy spec{.logits   = in[0],
                          .targets  = in[1],
                          .loss     = loss,
                          .scale    = 3,
                          .in_place = in_place,
                          .counted  = sg::CountedTargets{.all = all, .ignored = number}};
    if (scaled) spec.loss_scale = scale;
    sg::cross_entropy(tape, spec);
    return loss;
  };
  return test;
}

}  // namespace

TEST_CASE("ignored targets have no loss and no gradient, and the mean is over the others", "[ops][cross_entropy]") {
  const auto type     = GENERATE(sg::DType::f32, sg::DType::f64, sg::DType::bf16, sg::DType::f16);
  const bool in_place = GENERATE(false, true), scaled = GENERATE(false, true);
  CAPTURE(type, in_place, scaled);
  constexpr std::int64_t columns = 700;
  const std::vector<std::int32_t> targets{3, -1, 699, -1, -1, 0, 17};
  const auto some               = mean_case(columns, targets, in_place, scaled);
  std::vector<std::int32_t> all = targets;
  for (std::int32_t& target : all) target = std::max(target, 0);
  const auto loss     = sg::testing::evaluate(some, type)[0];
  const auto constant = loss_case(columns, all, scaled ? 64 * 3.0 / 4 : 3.0 / 4, in_place);
  // The rows that count have the bits of a constant scale, and the others are zero.
  const auto expected = sg::testing::gradients(constant, type).inputs[0],
             found    = sg::testing::gradients(some, type).inputs[0];
  double sum          = 0;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    CAPTURE(i);
    for (std::size_t j = i * columns; j < (i + 1) * columns; ++j)
      REQUIRE(found[j] == (targets[i] == sg::ignored_target ? 0 : expected[j]));
    if (targets[i] == sg::ignored_target) continue;
    const auto logits = sg::testing::values(some).inputs[0];
    const std::vector<double> row(logits.begin() + static_cast<std::ptrdiff_t>(i * columns),
                                  logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * columns));
    sum += plain(row, {targets[i]});
  }
  const double tolerance = type == sg::DType::f64 ? 1e-13 : type == sg::DType::f32 ? 1e-6 : 1e-2;
  CHECK(std::abs(loss - sum) < tolerance * sum);
}

TEST_CASE("a loss without a target that counts is zero, and so are its gradients", "[ops][cross_entropy]") {
  const bool in_place = GENERATE(false, true);
  const auto none     = mean_case(5, {-1, -1}, in_place, true);
  CHECK(sg::testing::evaluate(none)[0] == 0);
  CHECK(sg::testing::gradients(none).inputs[0] == std::vector<double>(10, 0));
}

TEST_CASE("a target outside the vocabulary stops the step and is named", "[ops][cross_entropy][refuses]") {
  CHECK_THROWS_MATCHES(sg::testing::evaluate(loss_case(4, {1, 2, 4})), sg::Error,
                       MessageMatches(ContainsSubstring("cross_entropy: target at position 2 is 4 (0 to 3)")));
  CHECK_THROWS_MATCHES(sg::testing::evaluate(loss_case(4, {1, -2})), sg::Error,
                       MessageMatches(ContainsSubstring("cross_entropy: target at position 1 is -2")));
  CHECK_THROWS_MATCHES(sg::testing::evaluate(loss_case(4, {-7})), sg::Error,
                       MessageMatches(ContainsSubstring("cross_entropy: target at position 0 is -7 (0 to 3)")));
}

TEST_CASE("cross-entropy refuses arguments that do not fit, with names and numbers", "[ops][cross_entropy][refuses]") {
  sg::Graph graph;
  sg::WeightTable weights;
  sg::Tape tape({.graph = &graph, .weights = &weights});
  const sg::Tensor logits = tape.tensor("logits", {3, 4}), targets = tape.tensor("targets", {3}, sg::DType::i32),
                   loss = tape.tensor("loss", {1}, sg::DType::f64), narrow = tape.tensor("loss", {2}, sg::DType::f32);
  const auto refuses = [&](const sg::CrossEntropy& spec, const std::string& why) {
    CHECK_THROWS_MATCHES(sg::cross_entropy(tape, spec), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refuses({.logits = logits, .targets = tape.tensor("targets", {2}, sg::DType::i32), .loss = loss},
          "cross_entropy: 2 targets for 3 rows");
  refuses({.logits = logits, .targets = logits, .loss = loss}, "cross_entropy: targets are f32 (i32)");
  refuses({.logits = logits, .targets = targets, .loss = narrow}, "the loss goes to 8 bytes of f32 (one f64)");
  refuses({.logits = logits, .targets = targets, .loss = logits}, "the loss goes to 48 bytes of f32 (one f64)");
  refuses({.logits = logits, .targets = targets, .loss = loss, .vocab_begin = -4}, "vocab_begin is -4");
  CHECK(graph.num_nodes() == 0);
}
