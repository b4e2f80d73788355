#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include "backends/loopback/world.hpp"
#include "engine/run/executor.hpp"
#include "ops/transfers/clear.hpp"
#include "ops/transfers/convert.hpp"
#include "ops/transfers/reduce.hpp"
#include "ops/updates/scaled_sum.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/ops/elements.hpp"

namespace sg = stepgraph;

namespace {

// A graph whose buffers are all set before the run and read after it.
struct Bench {
  sg::Graph graph;
  std::vector<std::pair<sg::Buffer, std::vector<double>>> set;
  std::vector<sg::Buffer> all;

  sg::Buffer buffer(std::int64_t count, sg::DType type, sg::Space space = sg::Space::device) {
    const sg::Buffer made = graph.buffer({.size_bytes = count * static_cast<std::int64_t>(sg::size_bytes(type)),
                                          .type       = type,
                                          .space      = space,
                                          .lifetime   = sg::Lifetime::persistent});
    std::vector<double> numbers;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t bits = sg::testing::mix(static_cast<std::uint64_t>(i) + 1000 * all.size());
      const bool whole         = type == sg::DType::u8 || type == sg::DType::i32 || type == sg::DType::i64;
      numbers.push_back(whole ? static_cast<double>(bits % 200) : static_cast<double>(bits >> 40) * 0x1p-23 - 1);
    }
    set.emplace_back(made, std::move(numbers));
    all.push_back(made);
    return made;
  }
  // Checks that a device gives the bits of the CPU.
  void check() const {
    CHECK((sg::testing::run_graph(graph, set, all, true) == sg::testing::run_graph(graph, set, all, false)));
  }
};

// Rows of `length` elements of 4 bytes.
sg::Access rows(sg::Buffer of, std::int64_t offset, std::int64_t length, std::int64_t stride, std::int64_t count) {
  return of.strided(4 * offset, 4 * length, 4 * stride, count);
}

}  // namespace

TEST_CASE("conversions on a device have the CPU's bits, in rows and in one range", "[ops][cuda][convert]") {
  sg::testing::need_device();
  const auto type = GENERATE(sg::DType::bf16, sg::DType::f16);
  // Whole vectors, tails, rows of vectors, and rows that are cut differently.
  struct Cut {
    std::int64_t length, stride, other_length, other_stride, count;
  };
  const Cut cut = GENERATE(Cut{4096, 4096, 4096, 4096, 4096}, Cut{3001, 3001, 3001, 3001, 3001},
                           Cut{32, 48, 64, 64, 1920}, Cut{30, 41, 7, 9, 2100});
  CAPTURE(type, cut.length, cut.count);
  Bench bench;
  const sg::Buffer wide = bench.buffer(cut.count / cut.length * cut.stride, sg::DType::f32),
                   half = bench.buffer(cut.count / cut.other_length * cut.other_stride, type),
                   back = bench.buffer(cut.count / cut.length * cut.stride, sg::DType::f32);
  const auto in_f32     = [&](sg::Buffer of) {
    return of.strided(0, 4 * cut.length, 4 * cut.stride, cut.count / cut.length);
  };
  const sg::Access in_half = half.strided(0, 2 * cut.other_length, 2 * cut.other_stride, cut.count / cut.other_length);
  sg::convert(bench.graph, {.name = "round", .to = in_half, .from = in_f32(wide)});
  sg::convert(bench.graph, {.name = "widen", .to = in_f32(back), .from = in_half});
  bench.check();
}

TEST_CASE("copies on a device move bytes that are cut differently on both sides", "[ops][cuda][copy]") {
  sg::testing::need_device();
  Bench bench;
  const sg::Buffer from = bench.buffer(3000, sg::DType::f32), to = bench.buffer(3000, sg::DType::f32);
  sg::copy(bench.graph, {.name = "range", .to = to.range(0, 400), .from = from.range(400, 400)});
  sg::copy(bench.graph, {.name = "rows", .to = rows(to, 200, 10, 15, 20), .from = rows(from, 3, 10, 11, 20)});
  sg::copy(bench.graph, {.name = "gathered", .to = to.range(4 * 600, 4 * 200), .from = rows(from, 0, 20, 50, 10)});
  sg::copy(bench.graph, {.name = "cut", .to = rows(to, 1000, 6, 10, 50), .from = rows(from, 1001, 20, 21, 15)});
  sg::copy(bench.graph, {.name = "lists",
                         .to   = {to.range(4 * 1600, 4 * 33), rows(to, 1700, 4, 8, 30)},
                         .from = {rows(from, 1, 3, 5, 11), from.range(4 * 700, 4 * 20), from.range(4 * 900, 4 * 100)}});
  sg::copy(bench.graph, {.name = "bytes", .to = to.strided(8000, 3, 7, 90), .from = from.range(9001, 270)});
  bench.check();
}

TEST_CASE("copies between pinned and device memory run concurrently in both directions, whole and in rows",
          "[ops][cuda][copy]") {
  sg::testing::need_device();
  constexpr auto pinned = sg::Space::pinned;
  constexpr auto f32    = sg::DType::f32;
  Bench bench;
  const sg::Buffer host_in = bench.buffer(100'003, f32, pinned), in = bench.buffer(100'003, f32),
                   out = bench.buffer(70'001, f32), host_out = bench.buffer(70'001, f32, pinned),
                   rows_out = bench.buffer(900, f32, pinned);
  for (int i = 0; i < 3; ++i) {
    sg::copy(bench.graph, {.name = "in", .lane = sg::LaneKind::h2d, .to = in, .from = host_in});
    sg::copy(bench.graph, {.name = "out", .lane = sg::LaneKind::d2h, .to = host_out, .from = out});
  }
  sg::copy(bench.graph, {.name = "rows",
                         .lane = sg::LaneKind::d2h,
                         .to   = rows(rows_out, 1, 20, 30, 25),
                         .from = rows(in, 3, 20, 41, 25)});
  sg::copy(bench.graph, {.name = "cut",
                         .lane = sg::LaneKind::h2d,
                         .to   = rows(in, 50'000, 6, 10, 50),
                         .from = rows(host_in, 1001, 20, 21, 15)});
  bench.check();
}

TEST_CASE("reductions on a device have the CPU's bits in every type", "[ops][cuda][reduce]") {
  sg::testing::need_device();
  const auto type      = GENERATE(sg::DType::u8, sg::DType::i32, sg::DType::i64, sg::DType::f16, sg::DType::bf16,
                                  sg::DType::f32, sg::DType::f64);
  const auto reduction = GENERATE(sg::Reduction::sum, sg::Reduction::average, sg::Reduction::min, sg::Reduction::max,
                                  sg::Reduction::product);
  CAPTURE(type, reduction);
  const auto size = static_cast<std::int64_t>(sg::size_bytes(type));
  Bench bench;
  const sg::Buffer a = bench.buffer(3003, type), b = bench.buffer(3003, type), c = bench.buffer(600, type),
                   d = bench.buffer(600, type);
  sg::reduce_into(bench.graph, {.name = "all", .into = a, .from = b, .reduction = reduction});
  sg::divide(bench.graph, {.name = "mean", .values = a, .count = 3});
  sg::reduce_into(bench.graph, {.name      = "rows",
                                .into      = c.strided(size, 5 * size, 9 * size, 60),
                                .from      = {d.strided(0, 3 * size, 5 * size, 80), d.range(500 * size, 60 * size)},
                                .reduction = reduction});
  sg::divide(bench.graph, {.name = "of rows", .values = c.strided(0, 16 * size, 32 * size, 10), .count = 7});
  bench.check();
}

TEST_CASE("reductions on a device have the CPU's bits at any address", "[ops][cuda][reduce]") {
  sg::testing::need_device();
  const auto type =
      GENERATE(sg::DType::i32, sg::DType::i64, sg::DType::f16, sg::DType::bf16, sg::DType::f32, sg::DType::f64);
  CAPTURE(type);
  const auto size = static_cast<std::int64_t>(sg::size_bytes(type));
  Bench bench;  // of bytes: any bits, so sums of floats would have NaNs that differ
  const sg::Buffer a = bench.buffer(4000, sg::DType::u8), b = bench.buffer(4000, sg::DType::u8);
  const bool whole = type == sg::DType::i32 || type == sg::DType::i64;
  sg::reduce_into(bench.graph, {.name      = "ranges",
                                .into      = a.range(1, 100 * size),
                                .from      = b.range(3, 100 * size),
                                .reduction = whole ? sg::Reduction::sum : sg::Reduction::min,
                                .type      = type});
  sg::reduce_into(bench.graph, {.name      = "rows",
                                .into      = a.strided(1001, 3 * size, 3 * size + 1, 40),
                                .from      = {b.range(1000, 60 * size), b.strided(2007, 5 * size, 7 * size + 3, 12)},
                                .reduction = sg::Reduction::max,
                                .type      = type});
  if (whole) sg::divide(bench.graph, {.name = "mean", .values = a.range(2503, 50 * size), .count = 3, .type = type});
  bench.check();
}

TEST_CASE("min and max on a device order zeros by sign and have the CPU's NaN", "[ops][cuda][reduce]") {
  sg::testing::need_device();
  const auto type      = GENERATE(sg::DType::f16, sg::DType::bf16, sg::DType::f32, sg::DType::f64);
  const auto reduction = GENERATE(sg::Reduction::min, sg::Reduction::max);
  CAPTURE(type, reduction);
  sg::Graph graph;
  const std::int64_t bytes = 600 * static_cast<std::int64_t>(sg::size_bytes(type));
  const auto buffer        = [&](const char* name) {
    return graph.buffer({.name = name, .size_bytes = bytes, .type = type, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer into = buffer("into"), from = buffer("from");
  sg::reduce_into(graph, {.name = "extreme", .into = into, .from = from, .reduction = reduction});
  const auto run = [&](sg::World& world) {
    const sg::Program program(graph, world);
    std::vector<std::byte> image(static_cast<std::size_t>(bytes));
    for (const sg::Buffer each : {into, from}) {
      sg::testing::fill(image, type, sg::testing::Fill::special, sg::Rank{0}, 1, each.id);
      program.memory().write(each, std::span<const std::byte>(image));
    }
    sg::Executor({.threads = 1}).run(program);
    program.memory().read(into, std::span(image));
    return image;
  };
  sg::LoopbackWorld loopback(1);
  CHECK((run(*sg::testing::device_world()) == run(loopback)));
}

TEST_CASE("a device clears bytes, and adds a few numbers in order", "[ops][cuda][clear]") {
  sg::testing::need_device();
  Bench bench;
  const sg::Buffer values = bench.buffer(100, sg::DType::f32), losses = bench.buffer(11, sg::DType::f64),
                   mean = bench.buffer(1, sg::DType::f64);
  sg::clear(bench.graph, {.name = "clear", .values = values.range(6, 201)});
  sg::scaled_sum(bench.graph, {.name = "mean", .values = losses, .to = mean, .factor = 1.0 / 11});
  const sg::Buffer ignored = bench.buffer(1, sg::DType::i64), some = bench.buffer(1, sg::DType::f64),
                   none = bench.buffer(1, sg::DType::f64);
  const auto number     = static_cast<std::int64_t>(bench.set[3].second[0]);  // of `ignored`
  sg::scaled_sum(bench.graph, {.name    = "mean of some",
                               .values  = losses,
                               .to      = some,
                               .counted = sg::CountedTargets{.all = number + 7, .ignored = ignored}});
  sg::scaled_sum(bench.graph,
                 {.name    = "mean of none",
                  .values  = losses,
                  .to      = none,
                  .counted = sg::CountedTargets{.all = std::max<std::int64_t>(1, number), .ignored = ignored}});
  bench.check();
}
