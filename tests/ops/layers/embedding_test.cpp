#include "ops/layers/embedding.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "tests/support/ops/op_case.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

sg::testing::OpCase embedding_case(std::vector<std::int32_t> tokens) {
  return {.weights = {{"wte", {5, 3}}},
          .tokens  = std::move(tokens),
          .build   = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
            return sg::embedding(tape, {.tokens = in[0], .weight = tape.weight("wte")});
          }};
}

sg::testing::OpCase positional_case(std::int64_t context) {
  return {.inputs    = {{6, 4}},
          .weights   = {{"wpe", {context, 4}}},
          .sequences = 2,
          .seq       = 3,
          .build     = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
            return sg::positional_embedding(tape, {.x = in[0], .weight = tape.weight("wpe")});
          }};
}

struct Bench {
  sg::Graph graph;
  sg::WeightTable weights;
  sg::Tape tape{{.graph = &graph, .weights = &weights, .sequences = 2, .seq = 3}};
  Bench() {
    weights.add({.name = "table", .shape = {8, 4}});
    weights.add({.name = "vector", .shape = {8}});
    weights.add({.name = "short", .shape = {2, 4}});
  }
};

}  // namespace

TEST_CASE("an embedding is the weight's row for each token", "[ops][embedding]") {
  const std::vector<std::int32_t> tokens{4, 0, 0, 2};
  const auto test   = embedding_case(tokens);
  const auto weight = sg::testing::values(test).weights[0];
  std::vector<double> expected;
  for (const std::int32_t token : tokens) {
    for (int j = 0; j < 3; ++j) expected.push_back(weight[static_cast<std::size_t>(3 * token + j)]);
  }
  CHECK(sg::testing::evaluate(test) == expected);
}

TEST_CASE("an embedding's gradient sums the rows of each token, and is zero for absent tokens", "[ops][embedding]") {
  const auto test = embedding_case({4, 0, 0, 2, 0});
  sg::testing::check_gradients(test);
  const auto gradient = sg::testing::gradients(test).weights[0];
  CHECK(std::vector<double>(gradient.begin() + 3, gradient.begin() + 6) == std::vector<double>{0, 0, 0});
}

TEST_CASE("an embedding's gradient costs the rows that it adds to; the first one also sets the whole table",
          "[ops][embedding]") {
  Bench bench;
  const sg::Tensor tokens = bench.tape.tensor("tokens", {6}, sg::DType::i32);
  const sg::Buffer buffer = bench.graph.buffer({.size_bytes = 4 * (8 * 4), .type = sg::DType::f32});
  bench.weights.add({.name = "wte", .shape = {8, 4}, .value = buffer, .gradient = buffer});
  for (int i = 0; i < 2; ++i) {
    const sg::Tensor y = sg::embedding(bench.tape, {.tokens = tokens, .weight = bench.tape.weight("wte")});
    bench.tape.set_gradient(y, bench.tape.tensor("dy", y.shape));
  }
  bench.tape.emit_gradients();
  REQUIRE(bench.graph.num_nodes() == 4);
  const double added = 4 * (3 * 6 * 4), set = 4 * (8 * 4);
  CHECK(bench.graph.cost(sg::Node{2}) == sg::Cost{.bytes_moved = added + set});
  CHECK(bench.graph.cost(sg::Node{3}) == sg::Cost{.bytes_moved = added});
}

TEST_CASE("a token outside the vocabulary stops the step and is named", "[ops][embedding][refuses]") {
  CHECK_THROWS_MATCHES(sg::testing::evaluate(embedding_case({1, 2, 5})), sg::Error,
                       MessageMatches(ContainsSubstring("embedding: token at position 2 is 5 (0 to 4)")));
  CHECK_THROWS_MATCHES(sg::testing::evaluate(embedding_case({1, -1, 2})), sg::Error,
                       MessageMatches(ContainsSubstring("embedding: token at position 1 is -1 (0 to 4)")));
}

TEST_CASE("a positional embedding adds the position's row in each sequence", "[ops][embedding]") {
  const auto test   = positional_case(5);
  const auto values = sg::testing::values(test);
  std::vector<double> expected;
  for (std::size_t i = 0; i < 24; ++i) expected.push_back(values.inputs[0][i] + values.weights[0][i % 12]);
  CHECK(sg::testing::evaluate(test) == expected);
}

TEST_CASE("a positional embedding's gradients are correct, and zero beyond the end of the sequences",
          "[ops][embedding]") {
  sg::testing::check_gradients(positional_case(3));
  const auto longer = positional_case(5);
  sg::testing::check_gradients(longer);
  const auto gradient = sg::testing::gradients(longer).weights[0];
  CHECK(std::vector<double>(gradient.begin() + 12, gradient.end()) == std::vector<double>(8, 0));
}

TEST_CASE("embeddings refuse arguments that do not fit, with names and numbers", "[ops][embedding][refuses]") {
  Bench bench;
  const sg::Tensor tokens = bench.tape.tensor("tokens", {6}, sg::DType::i32), x = bench.tape.tensor("x", {6, 4});
  const auto refuses = [](const auto& call, const std::string& why) {
    CHECK_THROWS_MATCHES(call(), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refuses([&] { return sg::embedding(bench.tape, {.tokens = x, .weight = bench.tape.weight("table")}); },
          "embedding: tokens are f32 (i32)");
  refuses([&] { return sg::embedding(bench.tape, {.tokens = tokens, .weight = bench.tape.weight("vector")}); },
          "embedding: weight is 8 (ROWSxWIDTH)");
  refuses(
      [&] {
        return sg::embedding(bench.tape, {.tokens = tokens, .weight = bench.tape.weight("table"), .vocab_begin = 3});
      },
      "embedding: vocab_begin is 3 on tensor-parallel rank 0 (0)");
  refuses([&] { return sg::positional_embedding(bench.tape, {.x = x, .weight = bench.tape.weight("short")}); },
          "positional_embedding: sequences of 3 tokens, but the weight has positions 0 to 2 (0 to 3 or more)");
  const sg::Tensor wide = bench.tape.tensor("x", {6, 5}), few = bench.tape.tensor("x", {5, 4});
  for (const sg::Tensor& bad : {wide, few}) {
    refuses([&] { return sg::positional_embedding(bench.tape, {.x = bad, .weight = bench.tape.weight("table")}); },
            "(6x4)");
  }
  CHECK(bench.graph.num_nodes() == 0);
}

TEST_CASE("embeddings in bf16 and f16 are those in f32, rounded", "[ops][embedding]") {
  sg::testing::check_halves(embedding_case({4, 0, 0, 2, 0}));
  sg::testing::check_halves(positional_case(5));
}

TEST_CASE("an embedding's gradient over many tiles sums each token's rows in order", "[ops][embedding]") {
  // A table of several tiles, with tokens on both sides of their borders.
  constexpr std::int64_t width = 512, rows = 1100;
  std::vector<std::int32_t> tokens;
  for (std::int32_t i = 0; i < 90; ++i) tokens.push_back(i % 3 == 0 ? 511 + i % 2 : (i * 487) % rows);
  const sg::testing::OpCase test{.weights = {{"wte", {rows, width}}},
                                 .tokens  = tokens,
                                 .build   = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                                   return sg::embedding(tape, {.tokens = in[0], .weight = tape.weight("wte")});
                                 }};
  const auto dy = sg::testing::output_gradient(test, sg::DType::f32);
  std::vector<float> expected(rows * width);
  for (std::size_t i = 0; i < dy.size(); ++i) {
    expected[static_cast<std::size_t>(tokens[i / width]) * width + i % width] += static_cast<float>(dy[i]);
  }
  const auto found = sg::testing::gradients(test, sg::DType::f32).weights[0];
  CHECK((std::vector<float>(found.begin(), found.end()) == expected));
}
