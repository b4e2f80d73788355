// Bodies on a device need no more workspace than their nodes declare, and their bits do not depend on more.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "ops/layers/attention.hpp"
#include "ops/layers/cross_entropy.hpp"
#include "ops/layers/embedding.hpp"
#include "ops/layers/linear.hpp"
#include "ops/layers/norm.hpp"
#include "ops/layers/residual_norm.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/ops/op_case.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::testing::check_declared_workspace;
using sg::testing::OpCase;

namespace {

const std::vector<sg::DType> all_types{sg::DType::f32, sg::DType::f64, sg::DType::bf16, sg::DType::f16};

OpCase linear_case(std::int64_t rows, std::int64_t in, std::int64_t out, sg::Activation activation) {
  return {.inputs  = {{rows, in}},
          .weights = {{"w", {in, out}}, {"b", {out}}},
          .build   = [activation](sg::Tape& tape, const std::vector<sg::Tensor>& x) {
            return sg::linear(tape, {.x          = x[0],
                                       .weight     = tape.weight("w"),
                                       .bias       = tape.weight("b"),
                                       .layout     = sg::WeightLayout::in_out,
                                       .activation = activation});
          }};
}

std::vector<std::int32_t> some_tokens(std::int64_t count, std::int64_t vocab) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<std::int32_t>((i * i * 31 + 7 * i) % vocab));
  return tokens;
}

}  // namespace

TEST_CASE("a product needs no more workspace than it declares, measured or not", "[ops][cuda][workspace]") {
  const auto activation = GENERATE(sg::Activation::none, sg::Activation::gelu_tanh);
  check_declared_workspace(linear_case(5, 7, 3, activation), all_types);
  check_declared_workspace(linear_case(130, 264, 136, activation), all_types);
  if (sg::testing::sanitized()) return;
  // More than 10^9 flops: algorithms are measured, also of the weight gradient that is added in place.
  check_declared_workspace(linear_case(1024, 512, 1024, activation), {sg::DType::f32, sg::DType::bf16});
  check_declared_workspace(linear_case(8192, 256, 256, activation), {sg::DType::bf16});
}

TEST_CASE("attention needs no more workspace than it declares", "[ops][cuda][workspace]") {
  struct Shape {
    std::int64_t sequences, seq, heads, kv_heads, head_size;
  };
  const Shape s =
      GENERATE(Shape{2, 70, 4, 2, 20}, Shape{1, 128, 1, 1, 64}, Shape{3, 256, 4, 4, 64}, Shape{2, 384, 6, 2, 128});
  CAPTURE(s.sequences, s.seq, s.heads, s.kv_heads, s.head_size);
  const OpCase test{.inputs    = {{s.sequences * s.seq, (s.heads + 2 * s.kv_heads) * s.head_size}},
                    .sequences = s.sequences,
                    .seq       = s.seq,
                    .build =
                        [s](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                          const sg::Heads heads{.heads = s.heads, .kv_heads = s.kv_heads, .head_size = s.head_size};
                          return sg::attention(tape, {.qkv = in[0], .heads = heads, .scale = 0.25});
                        },
                    .range = 2};
  check_declared_workspace(test, {sg::DType::bf16, sg::DType::f16, sg::DType::f32});
}

TEST_CASE("attention of more sequences than its workspace holds computes them in parts",
          "[ops][cuda][workspace][.slow]") {
  constexpr std::int64_t sequences = 24, seq = 1024, heads = 12;
  const OpCase test{.inputs    = {{sequences * seq, 3 * heads * 64}},
                    .sequences = sequences,
                    .seq       = seq,
                    .build =
                        [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                          const sg::Heads of{.heads = heads, .kv_heads = heads, .head_size = 64};
                          return sg::attention(tape, {.qkv = in[0], .heads = of, .scale = 0.125});
                        },
                    .range = 2};
  check_declared_workspace(test, {sg::DType::bf16});
}

TEST_CASE("embeddings, rotations, norms and losses need no more workspace than they declare",
          "[ops][cuda][workspace]") {
  SECTION("the gradient of an embedding") {
    const std::int64_t count = GENERATE(1, 100, 3000);
    OpCase test{.weights = {{"table", {50, 24}}}, .tokens = some_tokens(count, 50)};
    test.build = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
      return sg::embedding(tape, {.tokens = in[0], .weight = tape.weight("table")});
    };
    check_declared_workspace(test, all_types);
  }
  SECTION("a rotary embedding") {
    const OpCase test{.inputs    = {{2 * 37, 8 * 20}},
                      .sequences = 2,
                      .seq       = 37,
                      .build =
                          [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                            return sg::rotary_embedding(tape, {.qkv   = in[0],
                                                               .heads = {.heads = 4, .kv_heads = 2, .head_size = 20},
                                                               .frequencies = sg::rotary_frequencies(20, 10'000)});
                          },
                      .in_place = true};
    check_declared_workspace(test, all_types);
  }
  SECTION("the weight gradients of a norm and of a residual") {
    const std::int64_t rows = GENERATE(3, 1500), width = GENERATE(5, 264);
    const bool centered = GENERATE(false, true), drops = GENERATE(false, true);
    OpCase test{.inputs    = {{rows, width}, {rows, width}},
                .weights   = {{"weight", {width}}, {"norm bias", {width}}, {"bias", {width}}},
                .sequences = rows};
    if (!centered) test.weights.erase(test.weights.begin() + 1);
    if (drops) test.step = 2;
    test.build = [=](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
      sg::ResidualNorm spec{
          .x = in[0], .branch = in[1], .bias = tape.weight("bias"), .norm_weight = tape.weight("weight")};
      if (centered) spec.norm_bias = tape.weight("norm bias");
      if (drops) spec.dropout = {.rate = 0.25, .site = "branch"};
      return sg::residual_norm(tape, spec).normed;
    };
    check_declared_workspace(test, all_types);
  }
  SECTION("cross-entropy") {
    const std::int64_t rows = GENERATE(3, 700);
    const bool in_place     = GENERATE(false, true);
    const OpCase test{.inputs = {{rows, 40}},
                      .tokens = some_tokens(rows, 40),
                      .build =
                          [in_place](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                            const sg::Tensor loss = tape.tensor("loss", {1}, sg::DType::f64);
                            sg::cross_entropy(tape,
                                              {.logits = in[0], .targets = in[1], .loss = loss, .in_place = in_place});
                            return loss;
                          },
                      .loss_scale = 1,
                      .in_place   = in_place};
    check_declared_workspace(test, all_types);
  }
}
