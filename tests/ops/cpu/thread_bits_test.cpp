// The bits of an op do not depend on the number of threads. All cases are large enough that each kernel is cut into
// several tiles.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/layers/activation.hpp"
#include "ops/layers/attention.hpp"
#include "ops/layers/cross_entropy.hpp"
#include "ops/layers/dropout.hpp"
#include "ops/layers/embedding.hpp"
#include "ops/layers/linear.hpp"
#include "ops/layers/norm.hpp"
#include "ops/layers/residual.hpp"
#include "ops/layers/residual_norm.hpp"
#include "tests/support/ops/op_case.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::testing::OpCase;

namespace {

constexpr std::int64_t sequences = 3, seq = 131, rows = sequences * seq, width = 200, vocab = 301;

struct Kind {
  std::string name;
  OpCase test;
};

std::vector<std::int32_t> tokens() {
  std::vector<std::int32_t> made;
  for (std::int64_t i = 0; i < rows; ++i) made.push_back(static_cast<std::int32_t>(i * 53 % vocab));
  return made;
}

OpCase of(OpCase test) {
  test.sequences = sequences;
  test.seq       = seq;
  return test;
}

std::vector<Kind> layers() {
  using In = std::vector<sg::Tensor>;
  std::vector<Kind> made;
  for (const sg::Activation activation : {sg::Activation::none, sg::Activation::gelu_tanh}) {
    made.push_back({activation == sg::Activation::none ? "linear" : "linear with gelu",
                    of({.inputs  = {{rows, width}},
                        .weights = {{"weight", {width, 333}}, {"bias", {333}}},
                        .build   = [activation](sg::Tape& tape, const In& in) {
                          return sg::linear(tape, {.x          = in[0],
                                                     .weight     = tape.weight("weight"),
                                                     .bias       = tape.weight("bias"),
                                                     .layout     = sg::WeightLayout::in_out,
                                                     .activation = activation});
                        }})});
  }
  made.push_back({"attention",
                  of({.inputs = {{rows, (6 + 2 * 3) * 20}}, .build = [](sg::Tape& tape, const In& in) {
                        return sg::attention(
                            tape, {.qkv = in[0], .heads = {.heads = 6, .kv_heads = 3, .head_size = 20}, .scale = 0.3});
                      }})});
  made.push_back({"rotary embedding", of({.inputs = {{rows, (6 + 2 * 3) * 20}},
                                          .build =
                                              [](sg::Tape& tape, const In& in) {
                                                return sg::rotary_embedding(
                                                    tape, {.qkv         = in[0],
                                                           .heads       = {.heads = 6, .kv_heads = 3, .head_size = 20},
                                                           .frequencies = sg::rotary_frequencies(20, 1e4)});
                                              },
                                          .in_place = true})});
  made.push_back({"layer norm", of({.inputs  = {{rows, width}},
                                    .weights = {{"weight", {width}}, {"bias", {width}}},
                                    .build   = [](sg::Tape& tape, const In& in) {
                                      return sg::layer_norm(
                                            tape,
                                            {.x = in[0], .weight = tape.weight("weight"), .bias = tape.weight("bias")});
                                    }})});
  made.push_back(
      {"RMS norm",
       of({.inputs = {{rows, width}}, .weights = {{"weight", {width}}}, .build = [](sg::Tape& tape, const In& in) {
             return sg::rms_norm(tape, {.x = in[0], .weight = tape.weight("weight")});
           }})});
  made.push_back({"residual with dropout", of({.inputs  = {{rows, width}, {rows, width}},
                                               .weights = {{"bias", {width}}},
                                               .build =
                                                   [](sg::Tape& tape, const In& in) {
                                                     return sg::residual(tape,
                                                                         {.x       = in[0],
                                                                          .branch  = in[1],
                                                                          .bias    = tape.weight("bias"),
                                                                          .dropout = {.rate = 0.3, .site = "here"}});
                                                   },
                                               .step = 2})});
  made.push_back({"residual and norm", of({.inputs  = {{rows, width}, {rows, width}},
                                           .weights = {{"weight", {width}}, {"norm bias", {width}}, {"bias", {width}}},
                                           .build   = [](sg::Tape& tape, const In& in) {
                                             const auto [y, normed] =
                                                 sg::residual_norm(tape, {.x           = in[0],
                                                                            .branch      = in[1],
                                                                            .bias        = tape.weight("bias"),
                                                                            .norm_weight = tape.weight("weight"),
                                                                            .norm_bias   = tape.weight("norm bias")});
                                             return sg::residual(tape, {.x = y, .branch = normed});
                                           }})});
  return made;
}

std::vector<Kind> elementwise_and_tables() {
  using In = std::vector<sg::Tensor>;
  std::vector<Kind> made;
  made.push_back({"gelu", of({.inputs = {{rows, width}},
                              .build  = [](sg::Tape& tape, const In& in) { return sg::gelu(tape, in[0]); }})});
  made.push_back({"silu", of({.inputs = {{rows, width}},
                              .build  = [](sg::Tape& tape, const In& in) { return sg::silu(tape, in[0]); }})});
  made.push_back({"swiglu", of({.inputs = {{rows, 2 * width}},
                                .build  = [](sg::Tape& tape, const In& in) { return sg::swiglu(tape, in[0]); }})});
  made.push_back(
      {"dropout", of({.inputs = {{rows, width}},
                      .build  = [](sg::Tape& tape,
                                  const In& in) { return sg::dropout(tape, in[0], {.rate = 0.3, .site = "here"}); },
                      .step   = 2})});
  made.push_back(
      {"embedding", of({.weights = {{"tokens", {vocab, width}}, {"positions", {seq, width}}},
                        .tokens  = tokens(),
                        .build   = [](sg::Tape& tape, const In& in) {
                          const sg::Tensor x = sg::embedding(tape, {.tokens = in[0], .weight = tape.weight("tokens")});
                          return sg::positional_embedding(tape, {.x = x, .weight = tape.weight("positions")});
                        }})});
  for (const bool in_place : {false, true}) {
    made.push_back(
        {"cross-entropy", of({.inputs = {{rows, vocab}},
                              .tokens = tokens(),
                              .build =
                                  [in_place](sg::Tape& tape, const In& in) {
                                    const sg::Tensor loss = tape.tensor("loss", {1}, sg::DType::f64);
                                    sg::cross_entropy(
                                        tape, {.logits = in[0], .targets = in[1], .loss = loss, .in_place = in_place});
                                    return loss;
                                  },
                              .loss_scale = 1,
                              .in_place   = in_place})});
  }
  return made;
}

// Their bytes, so that NaN equals NaN and 0 does not equal -0.
std::string bytes_of(const std::vector<double>& output, const sg::testing::OpValues& gradients) {
  std::string made;
  const auto add = [&](const std::vector<double>& values) {
    made.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
  };
  add(output);
  for (const auto& each : gradients.inputs) add(each);
  for (const auto& each : gradients.weights) add(each);
  return made;
}

void check_thread_counts(std::vector<Kind> kinds) {
  const auto type = GENERATE(sg::DType::f32, sg::DType::bf16, sg::DType::f16, sg::DType::f64);
  if (sg::testing::scale() > 1 && type != sg::DType::f32) return;  // sanitized
  for (Kind& kind : kinds) {
    const auto with = [&](int threads) {
      kind.test.threads = threads;
      return bytes_of(sg::testing::evaluate(kind.test, type), sg::testing::gradients(kind.test, type));
    };
    const std::string alone = with(1);
    for (const int threads : {2, 3, 8, 16}) {
      if (sg::testing::sanitized() && threads != 3) continue;
      CAPTURE(kind.name, type, threads);
      CHECK((with(threads) == alone));
    }
  }
}

}  // namespace

TEST_CASE("layers have the same bits for 1, 2, 3, 8 and 16 threads", "[ops][cpu][threads]") {
  check_thread_counts(layers());
}

TEST_CASE("activations, tables and losses have the same bits for 1, 2, 3, 8 and 16 threads", "[ops][cpu][threads]") {
  check_thread_counts(elementwise_and_tables());
}
