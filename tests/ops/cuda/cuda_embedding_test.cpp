#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "ops/layers/attention.hpp"
#include "ops/layers/embedding.hpp"
#include "ops/transfers/reduce.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/ops/elements.hpp"

namespace sg = stepgraph;
using sg::testing::check_on_device;
using sg::testing::OpCase;

namespace {

constexpr std::int32_t vocabulary = 501;

// Half of them are a few frequent tokens, as in a text, and some tokens never occur.
std::vector<std::int32_t> text(std::size_t count) {
  std::vector<std::int32_t> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bits = sg::testing::mix(i);
    const auto few           = static_cast<std::int32_t>((bits >> 8) % 7);
    tokens.push_back(bits % 2 == 0 ? few * few : static_cast<std::int32_t>((bits >> 8) % (vocabulary - 60)));
  }
  return tokens;
}

OpCase embedding_case(std::vector<std::int32_t> tokens, std::int64_t width) {
  return {.weights = {{"wte", {vocabulary, width}}},
          .tokens  = std::move(tokens),
          .build   = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
            return sg::embedding(tape, {.tokens = in[0], .weight = tape.weight("wte")});
          }};
}

}  // namespace

TEST_CASE("an embedding and its gradient on a device equal those on the CPU", "[ops][cuda][embedding]") {
  const std::int64_t width = GENERATE(1, 37, 40, 328);
  CAPTURE(width);
  check_on_device(embedding_case({500}, width));
  check_on_device(embedding_case(text(50), width));
  check_on_device(embedding_case(text(3001), width));
  check_on_device(embedding_case(std::vector<std::int32_t>(1000, 77), width));
}

TEST_CASE("an embedding's gradient on a device orders more tokens than one bit set holds", "[ops][cuda][embedding]") {
  check_on_device(embedding_case(text(270'000), 8), {sg::DType::bf16});
}

TEST_CASE("a shard of an embedding on a device ignores other ranks' tokens", "[ops][cuda][embedding]") {
  sg::testing::need_device();
  constexpr std::int64_t begin = 100, size = 30, width = 16, count = 400;
  sg::Graph graph;
  const auto kept = [&](std::int64_t elements, sg::DType type) {
    return graph.buffer({.size_bytes = elements * static_cast<std::int64_t>(sg::size_bytes(type)),
                         .type       = type,
                         .lifetime   = sg::Lifetime::persistent});
  };
  const sg::Buffer table = kept(size * width, sg::DType::f32), sum = kept(size * width, sg::DType::f32),
                   tokens = kept(count, sg::DType::i32), dy = kept(count * width, sg::DType::f32);
  sg::WeightTable weights;
  weights.add({.name = "wte", .shape = {size, width}, .value = table, .gradient = sum});
  sg::Tape tape({.graph = &graph, .weights = &weights, .tp = {.size = 2, .index = 1}, .seq = count});
  const sg::Tensor in  = tape.input(tokens, {count}, sg::DType::i32, false);
  const sg::Tensor y   = sg::embedding(tape, {.tokens = in, .weight = tape.weight("wte"), .vocab_begin = begin});
  const sg::Buffer out = kept(count * width, sg::DType::f32);
  sg::copy(graph, {.name = "keep", .to = out, .from = y});
  tape.set_gradient(y, tape.input(dy, {count, width}, sg::DType::f32, false));
  tape.emit_gradients();
  std::vector<double> given, numbers;
  for (std::size_t i = 0; i < count; ++i) given.push_back(static_cast<double>(sg::testing::mix(i) % (begin + size)));
  for (std::size_t i = 0; i < count * width; ++i) numbers.push_back(static_cast<double>(sg::testing::mix(i) % 64));
  const std::vector<std::pair<sg::Buffer, std::vector<double>>> set{
      {table, {numbers.begin(), numbers.begin() + size * width}}, {tokens, given}, {dy, numbers}};
  CHECK(
      (sg::testing::run_graph(graph, set, {out, sum}, true) == sg::testing::run_graph(graph, set, {out, sum}, false)));
}

TEST_CASE("positional embeddings on a device equal those on the CPU", "[ops][cuda][embedding]") {
  const auto [sequences, seq, context, width] =
      GENERATE(std::tuple{1, 1, 1, 1}, std::tuple{3, 7, 11, 5}, std::tuple{13, 40, 64, 48});
  CAPTURE(sequences, seq, context, width);
  check_on_device({.inputs    = {{sequences * seq, width}},
                   .weights   = {{"wpe", {context, width}}},
                   .sequences = sequences,
                   .seq       = seq,
                   .build     = [](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                     return sg::positional_embedding(tape, {.x = in[0], .weight = tape.weight("wpe")});
                   }});
}

TEST_CASE("a rotary embedding on a device equals that on the CPU", "[ops][cuda][rotary]") {
  struct Shape {
    std::int64_t sequences, seq, heads, kv_heads, head_size;
  };
  const Shape s = GENERATE(Shape{1, 1, 1, 1, 2}, Shape{2, 70, 2, 1, 6}, Shape{3, 45, 4, 2, 64}, Shape{1, 5, 1, 1, 300});
  CAPTURE(s.sequences, s.seq, s.heads, s.kv_heads, s.head_size);
  check_on_device({.inputs    = {{s.sequences * s.seq, (s.heads + 2 * s.kv_heads) * s.head_size}},
                   .sequences = s.sequences,
                   .seq       = s.seq,
                   .build =
                       [s](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                         return sg::rotary_embedding(
                             tape, {.qkv         = in[0],
                                    .heads       = {.heads = s.heads, .kv_heads = s.kv_heads, .head_size = s.head_size},
                                    .frequencies = sg::rotary_frequencies(s.head_size, 10000)});
                       },
                   .in_place = true});
}
