#include "ops/layers/residual_norm.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "ops/layers/norm.hpp"
#include "tests/support/ops/op_case.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::OpCase;

namespace {

struct Form {
  bool centered, biased;
  double rate;
  bool fused                                     = true;
  enum Use { both, sum_alone, normed_alone } use = both;
};

// Both outputs are used by default: the case returns normed + y, which is itself a residual.
OpCase block_case(const Form& form, std::int64_t rows = 3, std::int64_t width = 21) {
  OpCase test{.inputs = {{rows, width}, {rows, width}}, .weights = {{"weight", {width}}}, .sequences = rows};
  if (form.centered) test.weights.emplace_back("norm bias", sg::TensorShape{width});
  if (form.biased) test.weights.emplace_back("bias", sg::TensorShape{width});
  if (form.rate > 0) test.step = 2;
  test.build = [form](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    const auto bias = form.biased ? std::optional(tape.weight("bias")) : std::nullopt;
    const sg::Dropout dropout{.rate = form.rate, .site = "branch"};
    sg::ResidualNormed made;
    if (form.fused) {
      sg::ResidualNorm spec{.x = in[0], .branch = in[1], .bias = bias, .norm_weight = tape.weight("weight")};
      if (form.centered) spec.norm_bias = tape.weight("norm bias");
      spec.eps     = 1e-3;
      spec.dropout = dropout;
      made         = sg::residual_norm(tape, spec);
    } else {
      made.y = sg::residual(tape, {.x = in[0], .branch = in[1], .bias = bias, .dropout = dropout});
      made.normed =
          form.centered
              ? sg::layer_norm(
                    tape, {.x = made.y, .weight = tape.weight("weight"), .bias = tape.weight("norm bias"), .eps = 1e-3})
              : sg::rms_norm(tape, {.x = made.y, .weight = tape.weight("weight"), .eps = 1e-3});
    }
    if (form.use == Form::sum_alone) return made.y;
    if (form.use == Form::normed_alone) return made.normed;
    return sg::residual(tape, {.x = made.y, .branch = made.normed});
  };
  return test;
}

}  // namespace

TEST_CASE("a residual and its norm in one node have the bits of two nodes", "[ops][residual_norm]") {
  const Form form{.centered = GENERATE(false, true), .biased = GENERATE(false, true), .rate = GENERATE(0.0, 0.4)};
  const auto type          = GENERATE(sg::DType::f32, sg::DType::bf16, sg::DType::f16);
  const auto [rows, width] = GENERATE(std::pair{3, 21}, std::pair{70, 300});
  // All weights, including those of the norm, are f32. The bias of the residual must have the tape's type.
  const bool wide_weights = GENERATE(false, true) && !form.biased;
  static int seen         = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(form.centered, form.biased, form.rate, type, rows, width, wide_weights);
  Form apart  = form;
  apart.fused = false;
  OpCase one = block_case(form, rows, width), two = block_case(apart, rows, width);
  one.wide_weights = two.wide_weights = wide_weights;
  CHECK((sg::testing::evaluate(one, type) == sg::testing::evaluate(two, type)));
  const auto found = sg::testing::gradients(one, type), expected = sg::testing::gradients(two, type);
  CHECK((found.inputs == expected.inputs));
  CHECK((found.weights == expected.weights));
}

TEST_CASE("gradients of a residual with its norm agree with finite differences", "[ops][residual_norm][gradient]") {
  sg::testing::check_gradients(
      block_case({.centered = GENERATE(false, true), .biased = GENERATE(false, true), .rate = GENERATE(0.0, 0.4)}));
  sg::testing::check_gradients(block_case({.centered = true, .biased = true, .rate = 0, .use = Form::normed_alone}));
}

TEST_CASE("a residual whose norm is unused has the gradients of a residual", "[ops][residual_norm][gradient]") {
  OpCase test      = block_case({.centered = true, .biased = true, .rate = 0, .use = Form::sum_alone});
  const auto found = sg::testing::gradients(test);
  const auto dy    = sg::testing::output_gradient(test);
  CHECK(found.inputs[0] == dy);
  CHECK(found.inputs[1] == dy);
  CHECK(std::abs(found.weights[2][0] - (dy[0] + dy[21] + dy[42])) < 1e-15);
}

TEST_CASE("a residual with its norm is one node forward and two backward", "[ops][residual_norm]") {
  sg::Graph graph;
  sg::WeightTable weights;
  for (const char* name : {"weight", "norm bias", "bias"}) {
    weights.add({.name     = name,
                 .shape    = {3},
                 .value    = graph.buffer({.name = name, .size_bytes = 12, .type = sg::DType::f32}),
                 .gradient = graph.buffer({.name = name, .size_bytes = 12, .type = sg::DType::f32})});
  }
  sg::Tape tape({.graph = &graph, .weights = &weights});
  const sg::Tensor x = tape.tensor("x", {2, 3}), branch = tape.tensor("branch", {2, 3});
  const auto [y, normed] = sg::residual_norm(tape, {.x           = x,
                                                    .branch      = branch,
                                                    .bias        = tape.weight("bias"),
                                                    .norm_weight = tape.weight("weight"),
                                                    .norm_bias   = tape.weight("norm bias")});
  tape.set_gradient(y, tape.tensor("dy", {2, 3}));
  tape.set_gradient(normed, tape.tensor("dn", {2, 3}));
  tape.emit_gradients();
  CHECK(graph.num_nodes() == 3);
  CHECK(tape.gradient(x).buffer == tape.gradient(branch).buffer);
}

TEST_CASE("a residual with its norm refuses arguments that do not fit", "[ops][residual_norm][refuses]") {
  OpCase test     = block_case({.centered = true, .biased = true, .rate = 0});
  test.weights[0] = {"weight", {20}};
  CHECK_THROWS_MATCHES(sg::testing::evaluate(test), sg::Error,
                       MessageMatches(ContainsSubstring("residual_norm: weight is 20, but x is 3x21")));
  test            = block_case({.centered = true, .biased = true, .rate = 0});
  test.weights[2] = {"bias", {1}};
  CHECK_THROWS_MATCHES(sg::testing::evaluate(test), sg::Error,
                       MessageMatches(ContainsSubstring("residual_norm: bias is 1 (21)")));
}
