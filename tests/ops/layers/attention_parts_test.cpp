#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <vector>

#include "ops/cpu/attention/attention.hpp"
#include "ops/layers/attention.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg  = stepgraph;
namespace cpu = stepgraph::cpu;

TEMPLATE_TEST_CASE("parts of a head of attention have the bits of the whole head", "[ops][attention]", float, double,
                   sg::bf16, sg::f16) {
  using T = TestType;
  using W = sg::Wide<T>;
  // 64: float and double read whole tiles of queries in place, and rows of tiles are padded.
  const std::int64_t head_size = GENERATE(20, 64);
  CAPTURE(head_size);
  const sg::AttentionShape shape{.seq = 471, .heads = 2, .kv_heads = 1, .head_size = head_size, .scale = 0.7};
  std::vector<T> qkv(static_cast<std::size_t>(shape.seq * shape.qkv_row()));
  for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i] = sg::narrow<T>(static_cast<W>(std::sin(i * i % 1009)));
  const cpu::AttentionDropout dropout{.mask = {.key = 77, .dropped = 1U << 30, .scale = 4.0 / 3}, .all_heads = 2};
  const auto computed = [&](const std::vector<std::int64_t>& cuts) {
    std::vector<T> out(static_cast<std::size_t>(shape.seq * shape.out_row()));
    std::vector<W> log_sums(static_cast<std::size_t>(shape.seq * shape.heads));
    const cpu::AttentionForward<T> attention{shape, qkv.data(), out.data(), log_sums.data(), dropout};
    for (std::size_t i = cuts.size() - 1; i > 0; --i) {  // in another order than that of the whole
      for (std::int64_t head = 0; head < shape.heads; ++head) {
        std::vector<W> workspace(static_cast<std::size_t>(cpu::attention_forward_workspace<T>(shape)), W(1e3F));
        cpu::attention_forward(attention, cpu::HeadPart{0, head, cuts[i - 1], cuts[i]}, workspace.data());
      }
    }
    std::vector<double> values;
    for (const T each : out) values.push_back(static_cast<double>(sg::wide(each)));
    for (const W each : log_sums) values.push_back(static_cast<double>(each));
    return values;
  };
  const auto whole = computed({0, 471});
  CHECK(computed({0, 128, 384, 471}) == whole);
  CHECK(computed({0, 256, 384, 471}) == whole);
}

TEST_CASE("attention with few heads and a long sequence is cut into parts that cover it", "[ops][attention]") {
  // 3 heads are fewer than 16 workspaces, so each is cut into parts. Rows around the cuts are compared with plain sums.
  const std::int64_t seq = 700;
  const sg::testing::OpCase test{
      .inputs = {{seq, 3 * 3 * 8}}, .seq = seq, .build = [](sg::Tape& tape, const auto& in) {
        return sg::attention(tape, {.qkv = in[0], .heads = {.heads = 3, .kv_heads = 3, .head_size = 8}, .scale = 0.4});
      }};
  const auto y   = sg::testing::evaluate(test);
  const auto qkv = sg::testing::values(test).inputs[0];
  for (const std::int64_t row : {0, 127, 128, 400, 511, 512, 639, 640, 699}) {
    for (std::int64_t head = 0; head < 3; ++head) {
      double sum = 0, value = 0;
      for (std::int64_t key = 0; key <= row; ++key) {
        double score = 0;
        for (std::int64_t i = 0; i < 8; ++i)
          score += qkv[static_cast<std::size_t>(row * 72 + head * 8 + i)] *
                   qkv[static_cast<std::size_t>(key * 72 + (3 + head) * 8 + i)];
        sum += std::exp(0.4 * score);
        value += std::exp(0.4 * score) * qkv[static_cast<std::size_t>(key * 72 + (6 + head) * 8)];
      }
      CAPTURE(row, head);
      CHECK(std::abs(y[static_cast<std::size_t>(row * 24 + head * 8)] - value / sum) < 1e-12);
    }
  }
}
