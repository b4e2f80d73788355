#include <algorithm>
#include <bit>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "ops/layers/attention.hpp"
#include "ops/shared/dropout_mask.hpp"
#include "ops/transfers/reduce.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/ops/op_case.hpp"

// Attention on all kinds of tapes: random ones, ranks of a tensor-parallel group, bf16; with any number of threads.
namespace sg  = stepgraph;
using Numbers = std::vector<double>;

namespace {

constexpr double scale       = 0.5;
constexpr std::uint64_t seed = 11;
constexpr const char* site   = "layer 2";

struct Case {
  std::int64_t sequences = 1, seq = 1, heads = 1, kv_heads = 1, head_size = 4;
  std::optional<double> rate  = 0.3;  // none: the tape is not random, although the op has a rate
  std::int64_t step           = 3;
  std::int64_t first_sequence = 0;
  int tp_size                 = 1;
  int tp_index                = 0;
  sg::DType type              = sg::DType::f64;
  int threads                 = 2;

  [[nodiscard]] std::int64_t rows() const { return sequences * seq; }
  [[nodiscard]] std::int64_t width() const { return (heads + 2 * kv_heads) * head_size; }
  [[nodiscard]] std::int64_t out_width() const { return heads * head_size; }
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.sequences << " x " << c.seq << ", heads " << c.heads << "/" << c.kv_heads << " of " << c.head_size
             << ", from sequence " << c.first_sequence;
}

Numbers numbers(std::uint64_t of, std::int64_t count) {
  Numbers made;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = sg::testing::mix(of * 1'000'003 + static_cast<std::uint64_t>(i)) >> 44;
    made.push_back((static_cast<double>(bits) - 524'287.5) / 524'288);
  }
  return made;
}

struct Result {
  Numbers out, d_qkv;
  friend bool operator==(const Result&, const Result&) = default;
};

Result run(const Case& c, const Numbers& qkv, const Numbers& d_out) {
  sg::Graph graph;
  sg::WeightTable weights;
  const auto kept = [&](const char* name, std::int64_t elements, sg::DType type) {
    return graph.buffer({.name       = name,
                         .size_bytes = elements * static_cast<std::int64_t>(sg::size_bytes(type)),
                         .type       = type,
                         .lifetime   = sg::Lifetime::persistent});
  };
  const sg::Buffer step = kept("step", 1, sg::DType::i64);
  sg::Tape tape({.graph     = &graph,
                 .weights   = &weights,
                 .type      = c.type,
                 .tp        = {.size = c.tp_size, .index = c.tp_index},
                 .sequences = c.sequences,
                 .seq       = c.seq,
                 .random = {.step = c.rate ? step : sg::Buffer{}, .seed = seed, .first_sequence = c.first_sequence}});
  const sg::TensorShape in_shape{c.rows(), c.width()}, out_shape{c.rows(), c.out_width()};
  const sg::Tensor x = tape.input(kept("qkv", c.rows() * c.width(), c.type), in_shape, c.type, true);
  const sg::Tensor y =
      sg::attention(tape, {.qkv     = x,
                           .heads   = {.heads = c.heads, .kv_heads = c.kv_heads, .head_size = c.head_size},
                           .scale   = scale,
                           .dropout = {.rate = c.rate.value_or(0.3), .site = site}});
  const sg::Buffer out = kept("out", c.rows() * c.out_width(), c.type),
                   dy  = kept("d_out", c.rows() * c.out_width(), c.type),
                   dx  = kept("d_qkv", c.rows() * c.width(), c.type);
  sg::copy(graph, {.name = "keep out", .to = out, .from = y});
  tape.set_gradient(y, tape.input(dy, out_shape, c.type, false));
  tape.emit_gradients();
  sg::copy(graph, {.name = "keep gradient", .to = dx, .from = tape.gradient(x)});
  sg::verify(graph);
  const sg::MemoryPlan plan = sg::plan_memory(graph);
  sg::verify({graph, plan});
  sg::LoopbackWorld world(1);
  const sg::Program program(sg::RunnableGraph(graph, plan), world);
  const auto store = [&](sg::Buffer to, const Numbers& from) {
    const auto bytes = program.memory().bytes(to);
    for (std::size_t i = 0; i < from.size(); ++i)
      sg::testing::encode(c.type, from[i], bytes.data() + i * sg::size_bytes(c.type));
  };
  const auto load = [&](sg::Buffer from) {
    const auto bytes = program.memory().bytes(from);
    Numbers found(bytes.size() / sg::size_bytes(c.type));
    for (std::size_t i = 0; i < found.size(); ++i)
      found[i] = sg::testing::decode(c.type, bytes.data() + i * sg::size_bytes(c.type));
    return found;
  };
  const auto arena = program.memory().arena(sg::Rank{0});
  std::memset(arena.data(), 0xFF, arena.size());  // NaN: no kernel may rely on zeros
  store(x.buffer, qkv);
  store(dy, d_out);
  program.memory().span<std::int64_t>(step)[0] = c.step;
  sg::Executor executor({.threads = c.threads});
  executor.run(program);
  return {load(out), load(dx)};
}
Result run(const Case& c) { return run(c, numbers(1, c.rows() * c.width()), numbers(2, c.rows() * c.out_width())); }

// The definition, with the mask of each probability by its index in the global batch.
Numbers reference(const Case& c, const Numbers& qkv) {
  const sg::DropoutMask mask =
      sg::DropoutSite{.active = true, .rate = *c.rate, .key = sg::derived_key(seed, sg::name_key(site))}.mask_at(
          c.step);
  Numbers out;
  for (std::int64_t row = 0; row < c.rows(); ++row) {
    const std::int64_t sequence = row / c.seq, query = row % c.seq;
    for (std::int64_t h = 0; h < c.heads; ++h) {
      const std::int64_t kv = h * c.kv_heads / c.heads;
      const auto at         = [&](std::int64_t position, std::int64_t head, std::int64_t i) {
        return qkv[static_cast<std::size_t>((sequence * c.seq + position) * c.width() + head * c.head_size + i)];
      };
      Numbers weights;
      double sum = 0;
      for (std::int64_t key = 0; key <= query; ++key) {
        double score = 0;
        for (std::int64_t i = 0; i < c.head_size; ++i) score += at(query, h, i) * at(key, c.heads + kv, i);
        weights.push_back(std::exp(score * scale));
        sum += weights.back();
      }
      const std::int64_t heads_before = (c.first_sequence + sequence) * c.tp_size * c.heads + c.tp_index * c.heads + h;
      for (std::int64_t i = 0; i < c.head_size; ++i) {
        double value = 0;
        for (std::int64_t key = 0; key <= query; ++key) {
          const auto number = static_cast<std::uint64_t>((heads_before * c.seq + query) * c.seq + key);
          if (!mask.keeps(number)) continue;
          value += weights[static_cast<std::size_t>(key)] / sum / (1 - *c.rate) * at(key, c.heads + c.kv_heads + kv, i);
        }
        out.push_back(value);
      }
    }
  }
  return out;
}

// Columns [from, from + count) of rows of `width`.
Numbers columns(const Numbers& of, std::int64_t width, std::int64_t from, std::int64_t count) {
  Numbers made;
  for (std::size_t row = 0; row * static_cast<std::size_t>(width) < of.size(); ++row) {
    const auto begin = of.begin() + static_cast<std::ptrdiff_t>(row) * width + from;
    made.insert(made.end(), begin, begin + count);
  }
  return made;
}

}  // namespace

TEST_CASE("attention drops probabilities by their index in the global batch", "[ops][attention][dropout]") {
  const auto c = GENERATE(Case{.seq = 9}, Case{.sequences = 2, .seq = 70, .heads = 4, .kv_heads = 2, .head_size = 8},
                          Case{.sequences = 2, .seq = 70, .heads = 2, .kv_heads = 1, .rate = 0.1, .first_sequence = 5},
                          // Index 2^32 is in the third sequence.
                          Case{.sequences = 3, .seq = 130, .first_sequence = 254'138},
                          Case{.seq = 20, .heads = 2, .kv_heads = 2, .tp_size = 4, .tp_index = 2});
  CAPTURE(c);
  const Numbers expected = reference(c, numbers(1, c.rows() * c.width()));
  CHECK(sg::testing::distance(run(c).out, expected) < 1e-13);
  Case in_f32 = c;
  in_f32.type = sg::DType::f32;
  CHECK(sg::testing::distance(run(in_f32).out, expected) < 1e-6);
  Case in_bf16 = c;
  in_bf16.type = sg::DType::bf16;
  CHECK(sg::testing::distance(run(in_bf16).out, expected) < 1e-2);  // inputs and outputs have 8 bits
  Case in_f16 = c;
  in_f16.type = sg::DType::f16;
  CHECK(sg::testing::distance(run(in_f16).out, expected) < 1e-2 / 8);  // 11 bits
}

TEST_CASE("gradients of attention with dropout agree with finite differences", "[ops][attention][dropout][gradient]") {
  const auto c = GENERATE(Case{.seq = 9}, Case{.sequences = 2, .seq = 70, .heads = 4, .kv_heads = 2, .head_size = 8},
                          Case{.sequences = 3, .seq = 130, .first_sequence = 254'138});
  CAPTURE(c);
  const Numbers x = numbers(1, c.rows() * c.width()), dy = numbers(2, c.rows() * c.out_width());
  const Numbers dx     = run(c, x, dy).d_qkv;
  const auto objective = [&](const Numbers& at) {
    const Numbers y = run(c, at, dy).out;
    double sum      = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  for (std::uint64_t direction = 0; direction < 4; ++direction) {
    const Numbers along = numbers(3 + direction, c.rows() * c.width());
    Numbers above = x, below = x;
    double found = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      above[i] += 1e-6 * along[i];
      below[i] -= 1e-6 * along[i];
      found += along[i] * dx[i];
    }
    const double expected = (objective(above) - objective(below)) / 2e-6;
    CHECK(std::abs(found - expected) < 1e-6 * std::max(1.0, std::abs(expected)));
  }
}

TEST_CASE("attention drops the same probabilities for any split of heads and sequences", "[ops][attention][dropout]") {
  const auto type = GENERATE(sg::DType::f32, sg::DType::bf16, sg::DType::f16);
  const Case whole{.sequences = 3, .seq = 70, .heads = 4, .kv_heads = 2, .head_size = 8, .type = type};
  const Numbers x = numbers(1, whole.rows() * whole.width()), dy = numbers(2, whole.rows() * whole.out_width());
  const Result expected = run(whole, x, dy);
  for (int rank = 0; rank < 2; ++rank) {  // two queries, a key and a value
    Case part          = whole;
    part.heads         = 2;
    part.kv_heads      = 1;
    part.tp_size       = 2;
    part.tp_index      = rank;
    const auto of_rank = [&](const Numbers& of, std::int64_t first, std::int64_t count) {
      return columns(of, whole.width(), (first + rank * count) * 8, count * 8);
    };
    Numbers mine;
    const Numbers queries = of_rank(x, 0, 2), keys = of_rank(x, 4, 1), values = of_rank(x, 6, 1);
    for (std::int64_t row = 0; row < whole.rows(); ++row) {
      for (const auto& [from, count] : {std::pair{&queries, 16}, std::pair{&keys, 8}, std::pair{&values, 8}}) {
        mine.insert(mine.end(), from->begin() + row * count, from->begin() + (row + 1) * count);
      }
    }
    const Result found = run(part, mine, columns(dy, 32, rank * 16, 16));
    CHECK(found.out == columns(expected.out, 32, rank * 16, 16));
    CHECK(columns(found.d_qkv, 32, 0, 16) == of_rank(expected.d_qkv, 0, 2));
    CHECK(columns(found.d_qkv, 32, 16, 8) == of_rank(expected.d_qkv, 4, 1));
    CHECK(columns(found.d_qkv, 32, 24, 8) == of_rank(expected.d_qkv, 6, 1));
  }
  for (std::int64_t sequence = 0; sequence < 3; ++sequence) {
    Case part              = whole;
    part.sequences         = 1;
    part.first_sequence    = sequence;
    const auto of_sequence = [&](const Numbers& of) {
      const auto size = static_cast<std::ptrdiff_t>(of.size() / 3);
      return Numbers(of.begin() + sequence * size, of.begin() + (sequence + 1) * size);
    };
    CHECK(run(part, of_sequence(x), of_sequence(dy)) == Result{of_sequence(expected.out), of_sequence(expected.d_qkv)});
  }
}

TEST_CASE("attention drops nothing on a tape that is not random, and other elements at each step",
          "[ops][attention][dropout]") {
  Case c{.sequences = 2, .seq = 40, .heads = 2, .kv_heads = 2, .head_size = 8};
  const Result dropped = run(c);
  CHECK(run(c) == dropped);
  c.step = 4;
  CHECK(run(c) != dropped);
  c.rate             = 0;
  const Result plain = run(c);
  c.rate             = std::nullopt;
  CHECK(run(c) == plain);
  CHECK(plain != dropped);
}

TEST_CASE("attention's bits do not depend on the number of threads", "[ops][attention]") {
  const auto type = GENERATE(sg::DType::f32, sg::DType::f64, sg::DType::bf16, sg::DType::f16);
  const auto seq  = GENERATE(64, 67);
  Case c{.sequences = 5, .seq = seq, .heads = 6, .kv_heads = 3, .head_size = 16, .type = type, .threads = 1};
  const Result alone = run(c);
  for (const int threads : {2, 4}) {
    c.threads = threads;
    CHECK(run(c) == alone);
  }
}

TEST_CASE("attention in bf16 and f16 equals that of its inputs, rounded", "[ops][attention][bf16]") {
  const auto type = GENERATE(sg::DType::bf16, sg::DType::f16);
  const auto seq  = GENERATE(1, 33, 128);
  const auto rate = GENERATE(0.0, 0.25);  // the factor 4/3 of what is kept is not exact in 8 bits
  CAPTURE(type, seq, rate);
  Case c{.sequences = 2, .seq = seq, .heads = 4, .kv_heads = 2, .head_size = 16, .rate = rate};
  const auto rounded = [type](Numbers of) {
    for (double& each : of) {
      std::byte bytes[2];
      sg::testing::encode(type, each, bytes);
      each = sg::testing::decode(type, bytes);
    }
    return of;
  };
  const Numbers x = rounded(numbers(1, c.rows() * c.width())), dy = rounded(numbers(2, c.rows() * c.out_width()));
  const Result exact = run(c, x, dy);
  c.type             = type;
  const Result found = run(c, x, dy);
  // The largest error of one rounding to 8 bits, or to 11; mean squares are smaller. Products of bf16 also round the
  // probabilities, which adds a few percent.
  const double once = type == sg::DType::bf16 ? 0x1p-9 : 0x1p-12;
  CHECK(sg::testing::distance(found.out, exact.out) < (type == sg::DType::bf16 ? 1.1 : 1) * once);
  CHECK(sg::testing::distance(found.d_qkv, exact.d_qkv) < 1.5 * once);  // reads the rounded output
}
