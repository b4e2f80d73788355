#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "ops/layers/cross_entropy.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/ops/op_case.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

namespace {

using Numbers = std::vector<double>;

std::vector<std::int32_t> some_targets(std::int64_t rows, std::int64_t vocab) {
  std::vector<std::int32_t> targets;
  for (std::int64_t i = 0; i < rows; ++i) targets.push_back(static_cast<std::int32_t>((i * i * 31 + 7 * i) % vocab));
  return targets;
}

sg::testing::OpCase loss_case(std::int64_t rows, std::int64_t columns, bool in_place) {
  return {.inputs = {{rows, columns}},
          .tokens = some_targets(rows, columns),
          .build =
              [in_place](sg::Tape& tape, const std::vector<sg::Tensor>& in) {
                const sg::Tensor loss = tape.tensor("loss", {1}, sg::DType::f64);
                sg::cross_entropy(
                    tape, {.logits = in[0], .targets = in[1], .loss = loss, .scale = 0.5, .in_place = in_place});
                return loss;
              },
          .loss_scale = 0.5,
          .in_place   = in_place};
}

// Logits with a few bits, from -8 to 8.
Numbers some_logits(std::int64_t count) {
  Numbers logits;
  for (std::int64_t i = 0; i < count; ++i)
    logits.push_back(static_cast<double>(sg::testing::mix(static_cast<std::uint64_t>(i)) % 256) / 16 - 8);
  return logits;
}

sg::Buffer kept(sg::Graph& graph, const char* name, sg::Rank rank, std::int64_t count, sg::DType type) {
  return graph.buffer({.name       = name,
                       .rank       = rank,
                       .size_bytes = count * static_cast<std::int64_t>(sg::size_bytes(type)),
                       .type       = type,
                       .lifetime   = sg::Lifetime::persistent});
}

// A loss whose gradient overwrites the logits, split by columns, and buffer values before and after.
struct Cut {
  sg::Graph graph;
  std::vector<std::pair<sg::Buffer, Numbers>> set = {};
  std::vector<sg::Buffer> read                    = {};

  Cut(std::int64_t rows, std::int64_t columns, int ranks, sg::DType type, std::vector<std::int32_t> targets)
      : graph(ranks) {
    sg::TensorParallel tp{.size = ranks};
    std::vector<sg::Rank> everyone;
    for (int r = 0; r < ranks; ++r) everyone.push_back(sg::Rank{r});
    if (ranks > 1) tp.group = graph.group({.name = "tp", .ranks = everyone});
    const Numbers all = some_logits(rows * columns);
    sg::WeightTable weights;
    for (const sg::Rank rank : everyone) {
      tp.index                 = static_cast<int>(rank);
      const std::int64_t begin = columns * tp.index / ranks, width = columns * (tp.index + 1) / ranks - begin;
      sg::Tape tape({.graph = &graph, .weights = &weights, .rank = rank, .type = type, .tp = tp});
      const sg::Buffer logits = kept(graph, "logits", rank, rows * width, type),
                       given  = kept(graph, "targets", rank, rows, sg::DType::i32),
                       loss   = kept(graph, "loss", rank, 1, sg::DType::f64),
                       scale  = kept(graph, "scale", rank, 1, sg::DType::f64),
                       number = kept(graph, "ignored", rank, 1, sg::DType::i64);
      Numbers mine;
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto row = all.begin() + i * columns + begin;
        mine.insert(mine.end(), row, row + width);
      }
      set.emplace_back(logits, mine);
      set.emplace_back(given, Numbers(targets.begin(), targets.end()));
      set.emplace_back(scale, Numbers{16});
      const auto ignored = std::count(targets.begin(), targets.end(), sg::ignored_target);
      set.emplace_back(number, Numbers{static_cast<double>(ignored)});
      read.insert(read.end(), {logits, loss});
      sg::cross_entropy(tape, {.logits      = tape.input(logits, {rows, width}, type, true),
                               .targets     = tape.input(given, {rows}, sg::DType::i32, false),
                               .loss        = loss,
                               .scale       = 0.25 * static_cast<double>(rows),
                               .vocab_begin = begin,
                               .in_place    = true,
                               .loss_scale  = scale,
                               .counted     = sg::CountedTargets{.all = rows, .ignored = number}});
      tape.emit_gradients();
    }
  }
  [[nodiscard]] std::vector<Numbers> on(bool device) const { return sg::testing::run_graph(graph, set, read, device); }
};

}  // namespace

TEST_CASE("cross-entropy and its gradient on a device equal those on the CPU", "[ops][cuda]") {
  struct Shape {
    std::int64_t rows, columns;
  };
  // Rows with any alignment modulo 16 bytes; shorter than a vector; long rows, with several vectors per thread.
  const Shape shape   = GENERATE(Shape{1, 1}, Shape{5, 3}, Shape{37, 701}, Shape{9, 5003}, Shape{6, 16384});
  const bool in_place = GENERATE(false, true);
  const double range  = GENERATE(1.0, 60.0);
  if (sg::testing::sanitized() && range > 1) return;
  CAPTURE(shape.rows, shape.columns, in_place, range);
  auto test  = loss_case(shape.rows, shape.columns, in_place);
  test.range = range;
  sg::testing::check_on_device(test, {sg::DType::f32, sg::DType::f64, sg::DType::bf16, sg::DType::f16});
}

TEST_CASE("cross-entropy of more columns than shared memory holds equals that on the CPU", "[ops][cuda]") {
  sg::testing::check_on_device(loss_case(3, 120'007, true), {sg::DType::f32, sg::DType::bf16});
}

TEST_CASE("cross-entropy in place equals that on the CPU if a thread block has many rows", "[ops][cuda]") {
  // Short and long rows. Rows that are not whole vectors have changing alignments.
  const auto [rows, columns] = GENERATE(std::pair<std::int64_t, std::int64_t>{4501, 701}, std::pair{3001, 8},
                                        std::pair{1200, 4104}, std::pair{1201, 4099});
  if (sg::testing::sanitized() && (columns == 701 || columns == 4104)) return;
  CAPTURE(rows, columns);
  sg::testing::check_on_device(loss_case(rows, columns, true), {sg::DType::bf16, sg::DType::f16});
}

TEST_CASE("cross-entropy in place of infinite logits is NaN on a device, only in their rows", "[ops][cuda]") {
  constexpr double infinity   = std::numeric_limits<double>::infinity();
  constexpr std::int64_t rows = 6, columns = 5000;
  const auto type = GENERATE(sg::DType::f32, sg::DType::bf16, sg::DType::f16);
  Cut cut(rows, columns, 1, type, some_targets(rows, columns));
  Numbers& logits    = cut.set.front().second;
  const auto element = [&](std::int64_t row, std::int64_t column) -> double& {
    return logits[static_cast<std::size_t>(row * columns + column)];
  };
  element(1, 4999) = infinity;
  element(2, 17)   = std::numeric_limits<double>::quiet_NaN();
  for (std::int64_t j = 0; j < columns; ++j) element(3, j) = j % 2 == 0 ? -infinity : element(3, j);  // masked columns
  for (std::int64_t j = 0; j < columns; ++j) element(4, j) = -infinity;
  const Numbers gradient = cut.on(true)[0];
  for (std::int64_t i = 0; i < rows; ++i) {
    CAPTURE(i);
    const bool none = i == 1 || i == 2 || i == 4;
    double sum      = 0;
    for (std::int64_t j = 0; j < columns; ++j) sum += std::abs(gradient[static_cast<std::size_t>(i * columns + j)]);
    CHECK(std::isfinite(sum) == !none);
  }
}

TEST_CASE("cross-entropy in place, scaled and cut by columns, equals that on the CPU", "[ops][cuda]") {
  const auto type  = GENERATE(sg::DType::f32, sg::DType::bf16);
  const int ranks  = GENERATE(1, 2);
  const auto width = GENERATE(std::int64_t{703}, std::int64_t{50304});
  CAPTURE(static_cast<int>(type), ranks, width);
  constexpr std::int64_t rows = 11;
  const Cut cut(rows, width, ranks, type, some_targets(rows, width));
  const auto device = cut.on(true), host = cut.on(false);
  for (std::size_t i = 0; i < host.size(); ++i) {
    CAPTURE(i);
    const bool loss = i % 2 == 1;
    CHECK(sg::testing::distance(device[i], host[i]) < (loss || type == sg::DType::f32 ? 1e-5 : 0x1p-8));
  }
}

TEST_CASE("ignored targets have no loss and no gradient on a device, as on the CPU", "[ops][cuda]") {
  const auto type  = GENERATE(sg::DType::f32, sg::DType::f64, sg::DType::bf16, sg::DType::f16);
  const int ranks  = GENERATE(1, 2);
  const auto width = GENERATE(std::int64_t{703}, std::int64_t{4104}, std::int64_t{120'007});
  CAPTURE(static_cast<int>(type), ranks, width);
  constexpr std::int64_t rows = 11;
  auto targets                = some_targets(rows, width);
  for (const std::size_t i : {0, 3, 4, 10}) targets[i] = sg::ignored_target;
  const Cut cut(rows, width, ranks, type, targets);
  const auto device = cut.on(true), host = cut.on(false);
  for (std::size_t i = 0; i < host.size(); ++i) {
    CAPTURE(i);
    const bool loss = i % 2 == 1;
    CHECK(sg::testing::distance(device[i], host[i]) < (loss || sg::size_bytes(type) > 2 ? 1e-5 : 0x1p-8));
    if (loss) continue;
    const auto columns = device[i].size() / rows;
    for (std::size_t row = 0; row < rows; ++row) {
      if (targets[row] != sg::ignored_target) continue;
      const auto begin = device[i].begin() + static_cast<std::ptrdiff_t>(row * columns);
      CHECK(std::all_of(begin, begin + static_cast<std::ptrdiff_t>(columns), [](double each) { return each == 0; }));
    }
  }
}

TEST_CASE("a loss without a target that counts is zero on a device", "[ops][cuda]") {
  const auto type   = GENERATE(sg::DType::f32, sg::DType::bf16);
  const auto device = Cut(3, 100, 1, type, std::vector<std::int32_t>(3, sg::ignored_target)).on(true);
  CHECK(device[0] == Numbers(300, 0));
  CHECK(device[1] == Numbers{0});
}

TEST_CASE("a target outside the vocabulary makes the loss NaN on a device", "[ops][cuda]") {
  auto targets = some_targets(4, 100);
  targets[2]   = GENERATE(-2, 100, 2'000'000'000);
  const Cut cut(4, 100, 1, sg::DType::f32, targets);
  const auto device = cut.on(true);
  CHECK(std::isnan(device[1][0]));
}
