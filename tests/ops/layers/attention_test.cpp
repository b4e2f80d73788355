#include "ops/layers/attention.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>

#include "ops/cpu/attention/attention.hpp"
#include "tests/support/ops/op_case.hpp"

namespace sg  = stepgraph;
namespace cpu = stepgraph::cpu;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::OpCase;

namespace {

struct Shape {
  std::int64_t sequences, seq, heads, kv_heads, head_size;
  [[nodiscard]] std::int64_t rows() const { return sequences * seq; }
  [[nodiscard]] std::int64_t width() const { return (heads + 2 * kv_heads) * head_size; }
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.sequences << " x " << s.seq << ", heads " << s.heads << "/" << s.kv_heads << " of " << s.head_size;
}

constexpr double scale = 0.75;

// The case with `more` added to one element of its input.
OpCase attention_case(const Shape& s, std::size_t changed = 0, double more = 0, double range = 1) {
  return {.inputs    = {{s.rows(), s.width()}},
          .sequences = s.sequences,
          .seq       = s.seq,
          .build =
              [=](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                sg::Tensor qkv = in[0];
                if (more != 0) {
                  qkv = tape.tensor("changed", in[0].shape);
                  tape.add({.op = "change", .reads = in[0], .writes = qkv},
                           [changed, more](const sg::Context& context, auto zero) {
                             using T         = decltype(zero);
                             const auto from = context.read<T>();
                             const auto to   = context.write<T>();
                             std::copy(from.begin(), from.end(), to.begin());
                             to[changed] += static_cast<T>(more);
                           });
                }
                return sg::attention(tape,
                                     {.qkv   = qkv,
                                      .heads = {.heads = s.heads, .kv_heads = s.kv_heads, .head_size = s.head_size},
                                      .scale = scale});
              },
          .range = range};
}

// The definition: a matrix of scores, a softmax of each row, a sum of values.
std::vector<double> reference(const Shape& s, const std::vector<double>& qkv) {
  std::vector<double> out;
  for (std::int64_t row = 0; row < s.rows(); ++row) {
    const std::int64_t first = row / s.seq * s.seq;
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t kv = h * s.kv_heads / s.heads;
      const auto at         = [&](std::int64_t r, std::int64_t head, std::int64_t i) {
        return qkv[static_cast<std::size_t>(r * s.width() + head * s.head_size + i)];
      };
      std::vector<double> weights;
      double sum = 0;
      for (std::int64_t other = first; other <= row; ++other) {
        double score = 0;
        for (std::int64_t i = 0; i < s.head_size; ++i) score += at(row, h, i) * at(other, s.heads + kv, i);
        weights.push_back(std::exp(score * scale));
        sum += weights.back();
      }
      for (std::int64_t i = 0; i < s.head_size; ++i) {
        double value = 0;
        for (std::int64_t other = first; other <= row; ++other) {
          value += weights[static_cast<std::size_t>(other - first)] / sum * at(other, s.heads + s.kv_heads + kv, i);
        }
        out.push_back(value);
      }
    }
  }
  return out;
}

OpCase rotary_case(const Shape& s, const std::vector<double>& frequencies) {
  return {.inputs    = {{s.rows(), s.width()}},
          .sequences = s.sequences,
          .seq       = s.seq,
          .build =
              [=](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                return sg::rotary_embedding(
                    tape, {.qkv         = in[0],
                           .heads       = {.heads = s.heads, .kv_heads = s.kv_heads, .head_size = s.head_size},
                           .frequencies = frequencies});
              },
          .in_place = true};
}

}  // namespace

TEST_CASE("attention is the softmax of causal scores times values", "[ops][attention]") {
  const Shape s = GENERATE(Shape{1, 1, 1, 1, 1}, Shape{1, 5, 2, 2, 3}, Shape{2, 7, 4, 2, 8}, Shape{3, 33, 6, 1, 5},
                           Shape{2, 70, 4, 4, 20}, Shape{1, 131, 6, 3, 32});
  CAPTURE(s);
  const double range   = GENERATE(1.0, 4.0);
  const OpCase test    = attention_case(s, 0, 0, range);
  const auto expected  = reference(s, sg::testing::values(test).inputs[0]);
  const double f32_eps = range > 1 ? 3e-5 : 1e-6;  // scores of a few hundred lose that much in f32
  CHECK(sg::testing::distance(sg::testing::evaluate(test), expected) < 1e-12);
  CHECK(sg::testing::distance(sg::testing::evaluate(test, sg::DType::f32), expected) < f32_eps);
}

TEST_CASE("gradients of attention agree with finite differences", "[ops][attention][gradient]") {
  const Shape s = GENERATE(Shape{1, 1, 2, 1, 3}, Shape{2, 5, 2, 2, 3}, Shape{2, 6, 4, 2, 2}, Shape{1, 9, 3, 1, 5},
                           Shape{1, 37, 2, 1, 4});
  CAPTURE(s);
  check_gradients(attention_case(s));
}

TEST_CASE("gradients of attention over many tiles of queries and keys agree with the definition",
          "[ops][attention][gradient]") {
  const Shape s     = GENERATE(Shape{2, 67, 4, 2, 20}, Shape{1, 96, 2, 2, 16});
  const OpCase test = attention_case(s);
  const auto x = sg::testing::values(test).inputs[0], dy = sg::testing::output_gradient(test);
  const auto dx        = sg::testing::gradients(test).inputs[0];
  const auto objective = [&](const std::vector<double>& at) {
    const std::vector<double> y = reference(s, at);
    double sum                  = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  // Testing element by element would take long; along a few directions, all elements take part.
  for (int direction = 0; direction < 6; ++direction) {
    CAPTURE(direction);
    std::vector<double> above = x, below = x;
    double found = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double along = std::sin(static_cast<double>(i * i % 1009 + 31 * static_cast<std::size_t>(direction)));
      above[i] += 1e-6 * along;
      below[i] -= 1e-6 * along;
      found += along * dx[i];
    }
    const double expected = (objective(above) - objective(below)) / 2e-6;
    CHECK(std::abs(found - expected) < 1e-6 * std::max(1.0, std::abs(expected)));
  }
}

TEST_CASE("a token affects neither earlier positions nor other sequences", "[ops][attention]") {
  const Shape s         = {2, 37, 4, 2, 8};
  const auto type       = GENERATE(sg::DType::f32, sg::DType::f64);
  const auto row        = GENERATE(0, 20, 36, 37, 60);  // of both sequences
  const auto in_row     = GENERATE(0, 34, 50);          // a query, a key, a value
  const auto changed_at = static_cast<std::size_t>(row * s.width() + in_row);
  CAPTURE(row, in_row);
  const auto before      = sg::testing::evaluate(attention_case(s), type);
  const auto after       = sg::testing::evaluate(attention_case(s, changed_at, 0.5), type);
  const auto width       = static_cast<std::size_t>(s.heads * s.head_size);
  const auto changed_row = [&](std::int64_t r) {
    const auto begin = static_cast<std::size_t>(r) * width;
    return !std::equal(before.begin() + static_cast<std::ptrdiff_t>(begin),
                       before.begin() + static_cast<std::ptrdiff_t>(begin + width),
                       after.begin() + static_cast<std::ptrdiff_t>(begin));
  };
  std::vector<std::int64_t> changed, expected;
  for (std::int64_t r = 0; r < s.rows(); ++r) {
    if (changed_row(r)) changed.push_back(r);
    const bool sees = in_row < 32 ? r == row : r >= row && r / s.seq == row / s.seq;
    // The first position attends only to itself: its probability is always 1.
    if (sees && !(in_row < 48 && r % s.seq == 0)) expected.push_back(r);
  }
  CHECK(changed == expected);
}

TEST_CASE("attention handles scores that overflow an exponential, and propagates NaN", "[ops][attention]") {
  const Shape s     = {1, 20, 1, 1, 4};
  const OpCase test = attention_case(s, 0, 0, 30);  // scores of a few thousand
  for (const double each : sg::testing::evaluate(test, sg::DType::f32)) CHECK(std::isfinite(each));
  const auto gradients = sg::testing::gradients(test, sg::DType::f32);
  for (const double each : gradients.inputs[0]) CHECK(std::isfinite(each));
  const auto bad = sg::testing::evaluate(attention_case(s, 10 * 12 + 4, std::nan("")), sg::DType::f32);
  for (std::size_t i = 0; i < bad.size(); ++i) CHECK(std::isnan(bad[i]) == (i / 4 >= 10));
}

TEST_CASE("gradients of attention handle a last row whose probabilities would overflow if its scores were 0",
          "[ops][attention][gradient]") {
  // Scores of the last row are near `score`; blocks of queries are not whole.
  const Shape s      = GENERATE(Shape{1, 1, 1, 1, 4}, Shape{1, 9, 1, 1, 4}, Shape{2, 67, 2, 1, 4});
  const double score = GENERATE(-89.0, -95.0, -300.0);
  CAPTURE(s, score);
  OpCase test = attention_case(s, 0, 0, 0.0625);
  test.build  = [=, inner = test.build](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    const sg::Tensor moved = tape.tensor("moved", in[0].shape), from = in[0];
    tape.add<sg::AllTypes>(
        {.op = "move", .reads = from, .writes = moved}, [s, score](const sg::Context& context, auto zero) {
          using T       = decltype(zero);
          const auto to = context.write<T>();
          for (std::size_t i = 0; i < to.size(); ++i) {
            const std::int64_t row  = static_cast<std::int64_t>(i) / s.width(),
                               head = static_cast<std::int64_t>(i) % s.width() / 4;
            double more             = 0;
            if (static_cast<std::int64_t>(i) % 4 == 0 && head < s.heads && row % s.seq == s.seq - 1)
              more = score / scale / 2;
            if (static_cast<std::int64_t>(i) % 4 == 0 && head >= s.heads && head < s.heads + s.kv_heads) more = 2;
            to[i] = sg::narrow<T>(sg::wide(context.read<T>()[i]) + static_cast<sg::Wide<T>>(more));
          }
        });
    tape.on_backward({.outputs = {moved}, .input_gradients = [=](sg::Tape& back) { back.pass_gradient(from, moved); }});
    return inner(tape, {moved});
  };
  const auto exact = sg::testing::gradients(test).inputs[0],
             found = sg::testing::gradients(test, sg::DType::f32).inputs[0];
  CHECK(sg::testing::distance(found, exact) < 1e-4);
  const auto in_bf16 = sg::testing::gradients(test, sg::DType::bf16).inputs[0];
  for (const double each : in_bf16) CHECK(std::isfinite(each));
}

TEST_CASE("a rotary embedding turns a pair of elements by position times frequency", "[ops][rotary]") {
  const Shape s                   = {2, 70, 2, 1, 4};
  const auto frequencies          = sg::rotary_frequencies(4, 100);
  const OpCase test               = rotary_case(s, frequencies);
  std::vector<double> x           = sg::testing::values(test).inputs[0];
  const std::vector<double> found = sg::testing::evaluate(test), in_f32 = sg::testing::evaluate(test, sg::DType::f32);
  for (std::size_t row = 0; row < 140; ++row) {
    for (std::size_t head = 0; head < 3; ++head) {  // two queries and a key; the value is unchanged
      for (std::size_t i = 0; i < 2; ++i) {
        const double angle = static_cast<double>(row % 70) * (i == 0 ? 1 : 0.1);
        double &a = x[row * 16 + head * 4 + i], &b = x[row * 16 + head * 4 + i + 2];
        const double before = a;
        a                   = before * std::cos(angle) - b * std::sin(angle);
        b                   = b * std::cos(angle) + before * std::sin(angle);
      }
    }
  }
  CHECK(sg::testing::distance(found, x) < 1e-14);
  CHECK(sg::testing::distance(in_f32, x) < 1e-7);
}

TEST_CASE("a rotary embedding in bf16 and f16 rounds once, forward and backward", "[ops][rotary][bf16]") {
  const OpCase test = rotary_case({2, 70, 2, 1, 4}, sg::rotary_frequencies(4, 100));
  for (const sg::DType type : {sg::DType::bf16, sg::DType::f16}) {
    CAPTURE(type);
    const double once = type == sg::DType::bf16 ? 0x1p-8 : 0x1p-11;  // the inputs' rounding and that of the outputs
    CHECK(sg::testing::distance(sg::testing::evaluate(test, type), sg::testing::evaluate(test)) < once);
    CHECK(sg::testing::distance(sg::testing::gradients(test, type).inputs[0], sg::testing::gradients(test).inputs[0]) <
          once);
  }
}

TEST_CASE("rotary frequencies are powers of theta", "[ops][rotary]") {
  const auto found = sg::rotary_frequencies(8, 10000);
  CHECK(sg::testing::distance(found, {1, 0.1, 0.01, 0.001}) < 1e-15);
  CHECK_THROWS_AS(sg::rotary_frequencies(7, 10000), sg::Error);
  CHECK_THROWS_AS(sg::rotary_frequencies(8, 0), sg::Error);
}

TEST_CASE("a rotary embedding keeps norms, and makes scores depend on distances", "[ops][rotary]") {
  // All rows have the query and the key of the first.
  const Shape s = {1, 50, 1, 1, 6};
  OpCase test   = rotary_case(s, sg::rotary_frequencies(6, 50));
  test.build    = [inner = test.build](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
    const sg::Tensor same = tape.tensor("same", in[0].shape);
    tape.add({.op = "same", .reads = in[0], .writes = same}, [](const sg::Context& context, auto zero) {
      using T       = decltype(zero);
      const auto to = context.write<T>();
      for (std::size_t i = 0; i < to.size(); ++i) to[i] = context.read<T>()[i % 18];
    });
    return inner(tape, {same});
  };
  const auto y   = sg::testing::evaluate(test);
  const auto dot = [&](std::size_t a, std::size_t b) {
    double sum = 0;
    for (std::size_t i = 0; i < 6; ++i) sum += y[a + i] * y[b + i];
    return sum;
  };
  const auto query = [](std::size_t position) { return position * 18; };
  const auto key   = [](std::size_t position) { return position * 18 + 6; };
  for (std::size_t p = 0; p < 50; ++p) {
    CHECK(std::abs(dot(query(p), query(p)) - dot(query(0), query(0))) < 1e-13);
    CHECK(std::abs(dot(key(p), key(p)) - dot(key(0), key(0))) < 1e-13);
    if (p >= 7) CHECK(std::abs(dot(query(p), key(p - 7)) - dot(query(7), key(0))) < 1e-13);
  }
  CHECK(std::abs(dot(query(20), key(0)) - dot(query(7), key(0))) > 1e-2);
}

TEST_CASE("gradients of a rotary embedding agree with finite differences, in place or not", "[ops][rotary][gradient]") {
  check_gradients(rotary_case({2, 3, 2, 1, 4}, sg::rotary_frequencies(4, 100)));
  const Shape s = {1, 4, 2, 2, 4};
  OpCase both   = rotary_case(s, sg::rotary_frequencies(4, 100));
  both.build    = [rotary = both.build, attention = attention_case(s).build](
                   sg::Tape& tape, const std::vector<sg::Tensor>& in) { return attention(tape, {rotary(tape, in)}); };
  check_gradients(both);
}

TEST_CASE("the workspace of attention does not grow with long sequences, except for a panel of queries in bf16",
          "[ops][attention]") {
  const cpu::AttentionShape shorter{.seq = 256, .heads = 8, .kv_heads = 4, .head_size = 64};  // one tile of queries
  cpu::AttentionShape longer = shorter;
  longer.seq                 = 4096;
  CHECK(cpu::attention_forward_workspace<float>(longer) == cpu::attention_forward_workspace<float>(shorter));
  CHECK(cpu::attention_forward_workspace<sg::bf16>(longer) == cpu::attention_forward_workspace<sg::bf16>(shorter));
  CHECK(cpu::attention_backward_workspace<float>(longer) == cpu::attention_backward_workspace<float>(shorter));
  CHECK(cpu::attention_backward_workspace<sg::bf16>(longer) - cpu::attention_backward_workspace<sg::bf16>(shorter) ==
        (4096 - 256) * 2 * 64);
  CHECK(cpu::attention_backward_workspace<sg::f16>(longer) - cpu::attention_backward_workspace<sg::f16>(shorter) ==
        (4096 - 256) * 2 * 64);
}

TEST_CASE("a short sequence needs a small workspace for attention", "[ops][attention]") {
  const auto sizes = [](std::int64_t seq) {
    const cpu::AttentionShape shape{.seq = seq, .heads = 2, .kv_heads = 2, .head_size = 64};
    return std::pair{cpu::attention_forward_workspace<float>(shape), cpu::attention_backward_workspace<float>(shape)};
  };
  for (std::int64_t seq = 32; seq < 256; seq *= 2) {
    CAPTURE(seq);
    CHECK(sizes(seq).first < sizes(2 * seq).first);
    CHECK(sizes(seq).second <= sizes(2 * seq).second);
  }
  CHECK(4 * sizes(32).first < sizes(256).first);
  CHECK(3 * sizes(32).second < sizes(256).second);
}

TEST_CASE("attention and rotary embeddings refuse heads that do not fit", "[ops][attention][refuses]") {
  const auto refuses = [](const OpCase& test, const std::string& why) {
    CHECK_THROWS_MATCHES(sg::testing::evaluate(test), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  OpCase narrow    = attention_case({1, 4, 2, 2, 3});
  narrow.inputs[0] = {4, 17};
  refuses(narrow, "attention: qkv is 4x17, but 1 sequences of 4 with 2 heads and 2 x 2 kv_heads of 3 are 4x18");
  OpCase short_of_rows = attention_case({2, 4, 2, 2, 3});
  short_of_rows.seq    = 5;
  refuses(short_of_rows, "are 10x18");
  refuses(attention_case({1, 4, 3, 2, 3}), "attention: heads(3), kv_heads(2)");
  refuses(attention_case({1, 4, 1, 2, 3}), "attention: heads(1), kv_heads(2)");
  refuses(rotary_case({1, 4, 2, 2, 3}, {1}), "rotary_embedding: 1 frequencies for head_size(3)");
  refuses(rotary_case({1, 4, 2, 2, 4}, {1, 0.1, 0.01}), "rotary_embedding: 3 frequencies for head_size(4)");
}
