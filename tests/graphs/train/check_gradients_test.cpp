#include "graphs/train/check_gradients.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "graphs/models/mlp.hpp"
#include "ops/layers/linear.hpp"
#include "ops/tape/tape.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr sg::BatchSpec batch{.global = 2, .micro = 1, .seq = 8};

// y = sin(slope x), of which the backward pass takes the slope to be `believed`.
sg::Tensor wave(sg::Tape& tape, const sg::Tensor& x, double slope, double believed) {
  const sg::Tensor y = tape.tensor("wave", x.shape);
  tape.add({.op = "wave", .reads = x, .writes = y}, [slope]<class T>(const sg::Context& context, T) {
    const auto in  = context.read<T>();
    const auto out = context.write<T>();
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<T>(std::sin(slope * static_cast<double>(in[i])));
  });
  const auto backward = [slope, believed]<class T>(const sg::Context& context, sg::Into<T> dx) {
    const auto in = context.read<T>(0), dy = context.read<T>(1);
    for (std::int64_t i = 0; i < dx.size; ++i)
      dx.put(i, static_cast<T>(believed * std::cos(slope * static_cast<double>(in[i]))) * dy[i]);
  };
  tape.on_backward({.outputs = {y}, .input_gradients = [=](sg::Tape& back) {
                      back.add_gradient(x, {.op = "wave_gradient", .reads = {x, back.gradient(y)}}, backward);
                    }});
  return y;
}

sg::Model waves(double slope, double believed) {
  sg::Model model = sg::mlp({.layers = 2, .width = 16, .context = 8, .vocab = 32, .init_deviation = 0.3});
  model.blocks[2] = {.name    = "layer1",
                     .layer   = 1,
                     .weights = {{.name = "w", .shape = {16, 16}, .init = {.deviation = 0.3}}},
                     .forward = [=](sg::Tape& tape, const sg::Tensor& x) {
                       return wave(tape, sg::linear(tape, {.x = x, .weight = tape.weight("w")}), slope, believed);
                     }};
  return model;
}

}  // namespace

TEST_CASE("the gradients of every model are those of its loss, in several layouts", "[graphs][gradients]") {
  const auto model  = GENERATE(sg::testing::small_gpt2(0), sg::testing::small_gpt2(0.3), sg::testing::small_llama(0.3),
                               sg::mlp({.layers = 4, .width = 16, .context = 16, .vocab = 64}));
  const auto layout = GENERATE(sg::LayoutSpec{}, sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2});
  if (sg::testing::sanitized() && layout.num_ranks() == 1) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 3)) return;
  const int elements = sg::testing::sanitized() ? 1 : 3, global = sg::testing::sanitized() ? 2 : 4;
  sg::LoopbackWorld world(layout);
  const auto check = sg::check_gradients(model, world,
                                         {.plan     = {.layout = layout},
                                          .batch    = {.global = global, .micro = 1, .seq = 8},
                                          .elements = elements,
                                          .threads  = 2});
  CAPTURE(model.kind, to_string(layout), to_string(check));
  CHECK(check.passed());
  CHECK(check.tensors.size() == model.parameters().size());
  CHECK(check.num_checked == elements * static_cast<std::int64_t>(model.parameters().size()));
  CHECK(check.worst().error <= 1e-4);
}

TEST_CASE("the gradient of several weights that are tied to one is that of all their uses",
          "[graphs][gradients][tied]") {
  sg::Model model = sg::mlp({.layers = 4, .width = 16, .context = 16, .vocab = 32, .init_deviation = 0.2});
  for (const std::size_t layer : {std::size_t{1}, std::size_t{2}, std::size_t{4}})
    model.blocks[layer].weights[0].tied_to = "layers.2.up.weight";
  for (const int pp : {1, 2, 4}) {
    if (sg::testing::sanitized() && pp != 2) continue;
    const sg::LayoutSpec layout{.pp = pp};
    sg::LoopbackWorld world(layout);
    const auto check = sg::check_gradients(
        model, world, {.plan = {.layout = layout}, .batch = {.global = 4, .micro = 1, .seq = 8}, .threads = 2});
    CAPTURE(pp, to_string(check));
    CHECK(check.passed());
  }
}

TEST_CASE("a wrong backward pass is found, and the right one is not", "[graphs][gradients]") {
  sg::LoopbackWorld world(1);
  const auto right = sg::check_gradients(waves(2, 2), world, {.batch = batch, .threads = 1});
  CAPTURE(to_string(right));
  CHECK(right.passed());
  for (const double believed : {2.02, 0.0, -2.0}) {
    const auto wrong = sg::check_gradients(waves(2, believed), world, {.batch = batch, .threads = 1});
    CAPTURE(believed, to_string(wrong));
    CHECK_FALSE(wrong.passed());
    CHECK(wrong.worst().error > 5e-3);
    for (const sg::GradientError& tensor : wrong.tensors) {
      // The head is above the wrong op, so its gradient is right.
      CAPTURE(tensor.tensor);
      CHECK((tensor.error > wrong.tolerance) == (tensor.tensor != "head.weight"));
    }
    CHECK_THAT(to_string(wrong), ContainsSubstring("gradient of 'w', element ") &&
                                     ContainsSubstring(" by the backward pass, ") &&
                                     ContainsSubstring("largest relative error "));
  }
}

TEST_CASE("a gradient that is not a number is found", "[graphs][gradients]") {
  sg::LoopbackWorld world(1);
  const auto check = sg::check_gradients(waves(2, std::nan("")), world, {.batch = batch, .threads = 1});
  CHECK_FALSE(check.passed());
  CHECK(std::isnan(check.worst().error));
}

TEST_CASE("a check of no elements is refused", "[graphs][gradients][refuses]") {
  sg::LoopbackWorld world(1);
  CHECK_THROWS_WITH(sg::check_gradients(waves(2, 2), world, {.batch = batch, .elements = 0}),
                    "check_gradients: 0 elements (at least 1)");
}
