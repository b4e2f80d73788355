#include "ops/layers/residual.hpp"

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

sg::testing::OpCase residual_case(bool biased, double rate = 0) {
  sg::testing::OpCase test{.inputs = {{6, 70}, {6, 70}}};
  if (biased) test.weights = {{"b", {70}}};
  if (rate > 0) test.step = 8;
  test.build = [biased, rate](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    sg::Residual spec{.x = in[0], .branch = in[1]};
    if (biased) spec.bias = tape.weight("b");
    if (rate > 0) spec.dropout = {.rate = rate, .site = "branch"};
    return sg::residual(tape, spec);
  };
  return test;
}

}  // namespace

TEST_CASE("a residual adds branch and bias to x", "[ops][residual]") {
  const bool biased = GENERATE(false, true);
  const auto test   = residual_case(biased);
  const auto values = sg::testing::values(test);
  std::vector<double> expected;
  for (std::size_t i = 0; i < 6 * 70; ++i)
    expected.push_back(values.inputs[0][i] + values.inputs[1][i] + (biased ? values.weights[0][i % 70] : 0));
  CHECK(sg::testing::distance(sg::testing::evaluate(test), expected) < 1e-15);
}

TEST_CASE("a residual's gradients are correct", "[ops][residual]") {
  sg::testing::check_gradients(residual_case(GENERATE(false, true)));
}

TEST_CASE("x may be its own branch", "[ops][residual]") {
  sg::testing::check_gradients({.inputs = {{2, 3}}, .build = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                                  return sg::residual(tape, {.x = in[0], .branch = in[0]});
                                }});
}

TEST_CASE("a residual passes its gradient on without a node", "[ops][residual]") {
  sg::Graph graph;
  sg::WeightTable weights;
  sg::Tape tape({.graph = &graph, .weights = &weights});
  const sg::Tensor x = tape.tensor("x", {2, 3}), branch = tape.tensor("branch", {2, 3});
  const sg::Tensor y = sg::residual(tape, {.x = x, .branch = branch}), dy = tape.tensor("dy", {2, 3});
  tape.set_gradient(y, dy);
  tape.emit_gradients();
  CHECK(graph.num_nodes() == 1);
  CHECK(tape.gradient(x).buffer == dy.buffer);
  CHECK(tape.gradient(branch).buffer == dy.buffer);
}

TEST_CASE("a residual refuses shapes that differ", "[ops][residual][refuses]") {
  sg::Graph graph;
  sg::WeightTable weights;
  weights.add({.name = "b", .shape = {2}});
  sg::Tape tape({.graph = &graph, .weights = &weights});
  const sg::Tensor x = tape.tensor("x", {2, 3}), other = tape.tensor("other", {3, 2});
  CHECK_THROWS_MATCHES(sg::residual(tape, {.x = x, .branch = other}), sg::Error,
                       MessageMatches(ContainsSubstring("residual: branch is 3x2 (2x3)")));
  CHECK_THROWS_MATCHES(sg::residual(tape, {.x = x, .branch = x, .bias = tape.weight("b")}), sg::Error,
                       MessageMatches(ContainsSubstring("residual: bias is 2 (3)")));
}

TEST_CASE("a residual in bf16 and f16 is that in f32, rounded", "[ops][residual]") {
  sg::testing::check_halves(residual_case(GENERATE(false, true)));
}

TEST_CASE("a residual drops elements of branch and bias, never of x", "[ops][residual][dropout]") {
  const bool biased = GENERATE(false, true);
  CAPTURE(biased);
  const auto test = residual_case(biased, 0.25);
  sg::testing::check_gradients(test);
  sg::testing::check_halves(test);
  const auto values = sg::testing::values(test);
  const auto y      = sg::testing::evaluate(test);
  int dropped       = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double branch = (values.inputs[1][i] + (biased ? values.weights[0][i % 70] : 0)) / 0.75;
    const bool gone     = y[i] == values.inputs[0][i];
    CHECK((gone || std::abs(y[i] - values.inputs[0][i] - branch) < 1e-14));
    dropped += gone ? 1 : 0;
  }
  CHECK(dropped > 60);
  CHECK(dropped < 150);  // of 420
}
