#include "ops/layers/linear.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <utility>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/run/executor.hpp"
#include "ops/layers/activation.hpp"
#include "ops/transfers/reduce.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

struct Sizes {
  std::int64_t rows = 5, in = 7, out = 4;
};

sg::testing::OpCase linear_case(const Sizes& sizes, sg::WeightLayout layout, bool biased,
                                sg::Activation activation = sg::Activation::none) {
  sg::testing::OpCase test{
      .inputs  = {{sizes.rows, sizes.in}},
      .weights = {{"w", layout == sg::WeightLayout::in_out ? sg::TensorShape{sizes.in, sizes.out}
                                                           : sg::TensorShape{sizes.out, sizes.in}}}};
  if (biased) test.weights.emplace_back("b", sg::TensorShape{sizes.out});
  test.build = [layout, biased, activation](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    sg::Linear spec{.x = in[0], .weight = tape.weight("w"), .layout = layout, .activation = activation};
    if (biased) spec.bias = tape.weight("b");
    return sg::linear(tape, spec);
  };
  return test;
}

std::vector<double> plain(const Sizes& sizes, sg::WeightLayout layout, const sg::testing::OpValues& values) {
  const auto &x = values.inputs[0], &w = values.weights[0];
  const auto in = static_cast<std::size_t>(sizes.in), out = static_cast<std::size_t>(sizes.out);
  std::vector<double> y;
  for (std::size_t i = 0; i < static_cast<std::size_t>(sizes.rows); ++i) {
    for (std::size_t j = 0; j < out; ++j) {
      double sum = values.weights.size() > 1 ? values.weights[1][j] : 0;
      for (std::size_t k = 0; k < in; ++k)
        sum += x[i * in + k] * (layout == sg::WeightLayout::in_out ? w[k * out + j] : w[j * in + k]);
      y.push_back(sum);
    }
  }
  return y;
}

sg::Tensor activate(sg::Tape& tape, const sg::Tensor& x, sg::Activation activation) {
  if (activation == sg::Activation::silu) return sg::silu(tape, x);
  return sg::gelu(tape, x, activation == sg::Activation::gelu_tanh ? sg::Gelu::tanh : sg::Gelu::exact);
}

// The same with the activation as a separate op.
sg::testing::OpCase two_ops(sg::testing::OpCase test, sg::Activation activation) {
  test.build = [plain = test.build, activation](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    return activate(tape, plain(tape, in), activation);
  };
  return test;
}

// Two linears with an activation between them, which is part of the first linear or a separate op.
sg::testing::OpCase mlp_case(const Sizes& sizes, sg::Activation activation, bool one_op = true) {
  sg::testing::OpCase test{.inputs  = {{sizes.rows, sizes.in}},
                           .weights = {{"up", {sizes.in, sizes.out}}, {"b", {sizes.out}}, {"down", {5, sizes.out}}}};
  test.build = [activation, one_op](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    sg::Tensor h = sg::linear(tape, {.x          = in[0],
                                     .weight     = tape.weight("up"),
                                     .bias       = tape.weight("b"),
                                     .layout     = sg::WeightLayout::in_out,
                                     .activation = one_op ? activation : sg::Activation::none});
    if (!one_op) h = activate(tape, h, activation);
    return sg::linear(tape, {.x = h, .weight = tape.weight("down")});
  };
  return test;
}

// A tape to which ops are only added.
struct Bench {
  sg::Graph graph;
  sg::WeightTable weights;
  sg::Tape tape{{.graph = &graph, .weights = &weights}};
  sg::Weight weight(const std::string& name, const sg::TensorShape& shape) {
    const sg::Buffer buffer = graph.buffer({.size_bytes = 4 * sg::num_elements(shape), .type = sg::DType::f32});
    weights.add({.name = name, .shape = shape, .value = buffer, .gradient = buffer});
    return weights.find(name);
  }
  [[nodiscard]] std::vector<std::string> ops() const {
    std::vector<std::string> found;
    for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) found.emplace_back(graph.op(sg::Node{i}));
    return found;
  }
};

}  // namespace

TEST_CASE("linear is x w + bias, for both weight layouts", "[ops][linear]") {
  const auto layout = GENERATE(sg::WeightLayout::in_out, sg::WeightLayout::out_in);
  const bool biased = GENERATE(false, true);
  const Sizes sizes = GENERATE(Sizes{5, 7, 4}, Sizes{1, 1, 1}, Sizes{100, 150, 97});
  CAPTURE(static_cast<int>(layout), biased, sizes.rows);
  const auto test = linear_case(sizes, layout, biased);
  CHECK(sg::testing::distance(sg::testing::evaluate(test), plain(sizes, layout, sg::testing::values(test))) < 1e-14);
}

TEST_CASE("linear's gradients are correct", "[ops][linear]") {
  const auto layout = GENERATE(sg::WeightLayout::in_out, sg::WeightLayout::out_in);
  const bool biased = GENERATE(false, true);
  CAPTURE(static_cast<int>(layout), biased);
  sg::testing::check_gradients(linear_case({}, layout, biased));
}

TEST_CASE("a linear of many tiles has the same gradients as three plain loops", "[ops][linear]") {
  constexpr std::size_t rows = 130, in = 110, out = 140;
  const auto test      = linear_case({rows, in, out}, sg::WeightLayout::out_in, true);
  const auto values    = sg::testing::values(test);
  const auto dy        = sg::testing::output_gradient(test);
  const auto gradients = sg::testing::gradients(test);
  std::vector<double> dx(rows * in), dw(out * in), db(out);
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < out; ++j) {
      for (std::size_t k = 0; k < in; ++k) {
        dx[i * in + k] += dy[i * out + j] * values.weights[0][j * in + k];
        dw[j * in + k] += dy[i * out + j] * values.inputs[0][i * in + k];
      }
      db[j] += dy[i * out + j];
    }
  }
  CHECK(sg::testing::distance(gradients.inputs[0], dx) < 1e-14);
  CHECK(sg::testing::distance(gradients.weights[0], dw) < 1e-14);
  CHECK(sg::testing::distance(gradients.weights[1], db) < 1e-14);
}

TEST_CASE("a linear with an activation has the bits of one followed by the other, forward and backward",
          "[ops][linear]") {
  const auto activation = GENERATE(sg::Activation::gelu_tanh, sg::Activation::gelu_exact, sg::Activation::silu);
  const auto type       = GENERATE(sg::DType::f32, sg::DType::f64);
  const Sizes sizes     = GENERATE(Sizes{5, 7, 4}, Sizes{130, 40, 143});
  CAPTURE(static_cast<int>(activation), type, sizes.rows);
  const auto fused = linear_case(sizes, sg::WeightLayout::in_out, true, activation);
  const auto apart = two_ops(linear_case(sizes, sg::WeightLayout::in_out, true), activation);
  CHECK(sg::testing::evaluate(fused, type) == sg::testing::evaluate(apart, type));
  const auto found = sg::testing::gradients(fused, type), expected = sg::testing::gradients(apart, type);
  CHECK(found.inputs == expected.inputs);
  CHECK(found.weights == expected.weights);
}

TEST_CASE("the gradients of a linear with an activation are correct", "[ops][linear]") {
  const auto activation = GENERATE(sg::Activation::gelu_tanh, sg::Activation::gelu_exact, sg::Activation::silu);
  CAPTURE(static_cast<int>(activation));
  sg::testing::check_gradients(linear_case({}, sg::WeightLayout::in_out, true, activation));
}

TEST_CASE("a product's gradient fused with an activation has the bits of separate nodes", "[ops][linear]") {
  const auto activation = GENERATE(sg::Activation::gelu_tanh, sg::Activation::gelu_exact, sg::Activation::silu);
  const auto type       = GENERATE(sg::DType::f32, sg::DType::f64);
  const Sizes sizes     = GENERATE(Sizes{5, 7, 4}, Sizes{130, 40, 143});
  CAPTURE(static_cast<int>(activation), type, sizes.rows);
  const auto fused    = sg::testing::gradients(mlp_case(sizes, activation), type);
  const auto expected = sg::testing::gradients(mlp_case(sizes, activation, false), type);
  CHECK(fused.inputs == expected.inputs);
  CHECK(fused.weights == expected.weights);
}

TEST_CASE("gradients through an activation between two linears are correct", "[ops][linear]") {
  const auto activation = GENERATE(sg::Activation::gelu_tanh, sg::Activation::gelu_exact, sg::Activation::silu);
  CAPTURE(static_cast<int>(activation));
  sg::testing::check_gradients(mlp_case({}, activation));
  sg::testing::check_halves(mlp_case({67, 24, 40}, activation));
}

TEST_CASE("a product computes the activation's gradient if no other op uses the activated tensor", "[ops][linear]") {
  Bench bench;
  const sg::Tensor x  = bench.tape.tensor("x", {10, 20});
  const sg::Weight up = bench.weight("up", {30, 20}), down = bench.weight("down", {20, 30});
  const sg::Tensor h =
      sg::linear(bench.tape, {.x = x, .weight = up, .activation = sg::Activation::gelu_tanh, .name = "inner"});
  const auto use_otherwise = [&] {
    const sg::Tensor other = bench.tape.same_bytes(h);
    bench.tape.on_backward(
        {.outputs = {other}, .input_gradients = [h, other](sg::Tape& back) { back.pass_gradient(h, other); }});
    bench.tape.set_gradient(other, bench.tape.tensor("dother", h.shape));
  };
  const int other_use = GENERATE(0, 1, 2);  // none, before the product, after it
  CAPTURE(other_use);
  if (other_use == 1) use_otherwise();
  const sg::Tensor y = sg::linear(bench.tape, {.x = h, .weight = down});
  if (other_use == 2) use_otherwise();
  bench.tape.set_gradient(y, bench.tape.tensor("dy", y.shape));
  const auto before = bench.graph.num_buffers();
  bench.tape.emit_gradients();
  const std::vector<std::string> found = bench.ops();
  const auto has = [&](const char* op) { return std::find(found.begin(), found.end(), op) != found.end(); };
  CHECK(has("linear_input_gradient_gelu") == (other_use == 0));
  CHECK(has("gelu_backward") == (other_use != 0));
  if (other_use != 0) return;
  CHECK(found == std::vector<std::string>{"linear_gelu", "linear", "linear_weight_gradient",
                                          "linear_input_gradient_gelu", "linear_input_gradient",
                                          "linear_weight_gradient"});
  CHECK(bench.graph.num_buffers() - before == 2);  // the gradients of x and of the activation's input
  CHECK(bench.graph.cost(sg::Node{3}) == sg::Cost{.flops = 12000 + 300, .bytes_moved = 4 * (200 + 600 + 300 + 300)});
}

TEST_CASE("a linear keeps the input of its activation only for a backward pass", "[ops][linear]") {
  const bool records = GENERATE(false, true);
  sg::Graph graph;
  sg::WeightTable weights;
  const sg::Buffer buffer = graph.buffer({.size_bytes = 4 * 600, .type = sg::DType::f32});
  weights.add({.name = "w", .shape = {30, 20}, .value = buffer, .gradient = buffer});
  sg::Tape tape({.graph = &graph, .weights = &weights, .records = records});
  const sg::Tensor x = tape.tensor("x", {10, 20});
  const auto before  = graph.num_buffers();
  const sg::Tensor y =
      sg::linear(tape, {.x = x, .weight = tape.weight("w"), .activation = sg::Activation::gelu_tanh, .name = "up"});
  CHECK(graph.num_buffers() - before == (records ? 2 : 1));
  CHECK(graph.spec(y.buffer).name == "up");
  CHECK(graph.op(sg::Node{0}) == "linear_gelu");
}

namespace {

// A linear of numbers that are exact in bf16 and f16, run forward and backward on a tape of `type`.
struct Trained {
  std::vector<double> y, dx, dw, db;
};
Trained train(const Sizes& sizes, const sg::Linear& like, sg::DType type) {
  sg::Graph graph;
  sg::WeightTable weights;
  const bool out_in = like.layout == sg::WeightLayout::out_in;
  const auto kept   = [&](const sg::TensorShape& shape, sg::DType of) {
    return graph.buffer({.size_bytes = sg::num_elements(shape) * static_cast<std::int64_t>(sg::size_bytes(of)),
                           .type       = of,
                           .lifetime   = sg::Lifetime::persistent});
  };
  const auto add_weight = [&](const std::string& name, const sg::TensorShape& shape) {
    const sg::Buffer value = kept(shape, type), gradient = kept(shape, sg::wide_type(type));
    weights.add({.name = name, .shape = shape, .value = value, .gradient = gradient});
    return std::pair(value, gradient);
  };
  const auto [w, dw] =
      add_weight("w", out_in ? sg::TensorShape{sizes.out, sizes.in} : sg::TensorShape{sizes.in, sizes.out});
  const auto [b, db] = add_weight("b", {sizes.out});
  sg::Tape tape({.graph = &graph, .weights = &weights, .type = type});
  const sg::Tensor x  = tape.input(kept({sizes.rows, sizes.in}, type), {sizes.rows, sizes.in}, type, true);
  const sg::Tensor dy = tape.input(kept({sizes.rows, sizes.out}, type), {sizes.rows, sizes.out}, type, false);
  sg::Linear spec     = like;
  spec.x = x, spec.weight = tape.weight("w"), spec.bias = tape.weight("b");
  const sg::Tensor y = sg::linear(tape, spec);
  tape.set_gradient(y, dy);
  tape.emit_gradients();
  const sg::Buffer kept_y = kept(y.shape, type), kept_dx = kept(x.shape, type);
  sg::copy(graph, {.name = "keep y", .to = kept_y, .from = y});
  sg::copy(graph, {.name = "keep dx", .to = kept_dx, .from = tape.gradient(x)});
  sg::LoopbackWorld world(1);
  const sg::Program program(graph, world);
  const auto bytes   = [&](sg::Buffer of) { return program.memory().bytes(of); };
  std::uint64_t seed = 0;
  for (const sg::Buffer buffer : {x.buffer, dy.buffer, w, b}) {
    const std::size_t size = sg::size_bytes(type);
    for (std::size_t i = 0; i < bytes(buffer).size() / size; ++i) {
      const auto bits = static_cast<double>(sg::testing::mix(++seed) >> 57);  // 7 bits
      sg::testing::encode(type, (bits - 63.5) / 64, bytes(buffer).data() + i * size);
    }
  }
  sg::Executor executor({.threads = 2});
  executor.run(program);
  const auto load = [&](sg::Buffer of) {
    const sg::DType stored = graph.spec(of).type;
    std::vector<double> found(bytes(of).size() / sg::size_bytes(stored));
    for (std::size_t i = 0; i < found.size(); ++i)
      found[i] = sg::testing::decode(stored, bytes(of).data() + i * sg::size_bytes(stored));
    return found;
  };
  return {load(kept_y), load(kept_dx), load(dw), load(db)};
}

// The largest |a - b| / max(|b|, least).
double worst(const std::vector<double>& a, const std::vector<double>& b, double least) {
  double found = a.size() == b.size() ? 0 : 1e300;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double ratio = std::abs(a[i] - b[i]) / std::max(std::abs(b[i]), least);
    found              = std::isnan(ratio) ? 1e300 : std::max(found, ratio);
  }
  return found;
}

}  // namespace

TEST_CASE("in bf16 and f16, linear sums in f32 and rounds once; gradients of weights are not rounded",
          "[ops][linear]") {
  const auto type   = GENERATE(sg::DType::bf16, sg::DType::f16);
  const auto layout = GENERATE(sg::WeightLayout::in_out, sg::WeightLayout::out_in);
  const Sizes sizes = GENERATE(Sizes{5, 7, 4}, Sizes{130, 110, 145});
  CAPTURE(static_cast<int>(layout), sizes.rows);
  const sg::Linear like{.layout = layout};
  const Trained half = train(sizes, like, type), exact = train(sizes, like, sg::DType::f64);
  // The relative error of one rounding is at most 2^-8, or 2^-11. The errors of the sums are far below.
  const double once = type == sg::DType::bf16 ? 0x1.01p-8 : 0x1.01p-11;
  CHECK(worst(half.y, exact.y, 1e-2) < once);
  CHECK(worst(half.dx, exact.dx, 1e-2) < once);
  CHECK(worst(half.y, exact.y, 1e-2) > once / 40);  // otherwise it does not have that type
  CHECK(worst(half.dw, exact.dw, 1) < 1e-5);
  CHECK(worst(half.db, exact.db, 1) < 1e-5);
}

TEST_CASE("in bf16 and f16, a linear with an activation is within the rounding of the stored tensors",
          "[ops][linear]") {
  const auto type       = GENERATE(sg::DType::bf16, sg::DType::f16);
  const auto activation = GENERATE(sg::Activation::gelu_tanh, sg::Activation::gelu_exact, sg::Activation::silu);
  CAPTURE(static_cast<int>(activation));
  const sg::Linear like{.activation = activation};
  const Sizes sizes{130, 40, 143};
  const Trained half = train(sizes, like, type), exact = train(sizes, like, sg::DType::f64);
  // y is rounded twice and the gradient of the activation's input once, each by at most 2^-8, or 2^-11; on average by
  // much less.
  const double once = type == sg::DType::bf16 ? 0x1p-8 : 0x1p-11;
  CHECK(sg::testing::distance(half.y, exact.y) < once);
  CHECK(sg::testing::distance(half.dx, exact.dx) < once);
  CHECK(sg::testing::distance(half.dw, exact.dw) < once);
  CHECK(sg::testing::distance(half.db, exact.db) < once);
  CHECK(sg::testing::distance(half.y, exact.y) > once / 40);
}

TEST_CASE("linear costs two flops per multiplication, forward and for each gradient", "[ops][linear]") {
  Bench bench;
  const sg::Tensor x = bench.tape.tensor("x", {10, 20});
  const sg::Tensor y = sg::linear(bench.tape, {.x = x, .weight = bench.weight("w", {30, 20})});
  bench.tape.set_gradient(y, bench.tape.tensor("dy", y.shape));
  bench.tape.emit_gradients();
  REQUIRE(bench.graph.num_nodes() == 3);
  const char* const ops[] = {"linear", "linear_input_gradient", "linear_weight_gradient"};
  for (std::uint32_t i = 0; i < 3; ++i) {
    CHECK(bench.graph.op(sg::Node{i}) == ops[i]);
    CHECK(bench.graph.cost(sg::Node{i}) == sg::Cost{.flops = 12000, .bytes_moved = 4 * (200 + 600 + 300)});
  }
}

TEST_CASE("linear refuses arguments that do not fit, with names and numbers", "[ops][linear][refuses]") {
  Bench bench;
  const sg::Tensor x = bench.tape.tensor("x", {2, 3});
  const sg::Weight w = bench.weight("w", {4, 3}), b = bench.weight("b", {3}), cube = bench.weight("cube", {4, 3, 1});
  const auto refuses = [&](const sg::Linear& spec, const std::string& why) {
    CHECK_THROWS_MATCHES(sg::linear(bench.tape, spec), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refuses({.x = x, .weight = w, .layout = sg::WeightLayout::in_out, .name = "up"},
          "up: weight is 4x3 for x of 2x3 (3xOUT)");
  refuses({.x = bench.tape.tensor("x", {2, 4}), .weight = w}, "linear: weight is 4x3 for x of 2x4 (OUTx4)");
  refuses({.x = x, .weight = cube}, "linear: weight is 4x3x1");
  refuses({.x = x, .weight = w, .bias = b}, "linear: bias is 3 (4)");
  refuses({.x = bench.tape.tensor("x", {2, 3}, sg::DType::f64), .weight = w},
          "linear: x is f64, the tape computes in f32");
  CHECK(bench.graph.num_nodes() == 0);
}
