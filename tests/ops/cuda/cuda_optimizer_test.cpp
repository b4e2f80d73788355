#include <bit>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <limits>
#include <utility>

#include "engine/run/context.hpp"
#include "engine/run/device.hpp"
#include "ops/cuda/updates/exact_squares.hpp"
#include "ops/updates/loss_scale.hpp"
#include "ops/updates/optimizer.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/ops/op_case.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;

namespace {

using Numbers = std::vector<double>;

sg::Buffer kept(sg::Graph& graph, const char* name, std::int64_t count, sg::DType type) {
  return graph.buffer({.name       = name,
                       .size_bytes = count * static_cast<std::int64_t>(sg::size_bytes(type)),
                       .type       = type,
                       .lifetime   = sg::Lifetime::persistent});
}

// Between -1 and 1, with 8 bits: exact in all types.
Numbers some(std::int64_t count, std::uint64_t seed) {
  Numbers numbers;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = sg::testing::mix(seed * 1'000'003 + static_cast<std::uint64_t>(i)) >> 56;
    numbers.push_back((static_cast<double>(bits) - 127.5) / 128);
  }
  return numbers;
}

// `count` elements: a whole buffer, or rows of `length` with gaps of the same size.
struct Places {
  std::int64_t count;
  std::int64_t length = 0;
  [[nodiscard]] std::int64_t room() const { return length == 0 ? count : 2 * count; }
  [[nodiscard]] sg::Access of(sg::Buffer buffer, sg::DType type) const {
    const auto element = static_cast<std::int64_t>(sg::size_bytes(type));
    if (length == 0) return buffer;
    return {buffer, {.offset = 0, .length = length * element, .stride = 2 * length * element, .count = count / length}};
  }
};

struct Run {
  sg::Graph graph;
  std::vector<std::pair<sg::Buffer, Numbers>> set = {};
  std::vector<sg::Buffer> read                    = {};
  sg::Buffer add(const char* name, sg::DType type, Numbers values) {
    const sg::Buffer buffer = kept(graph, name, std::ssize(values), type);
    set.emplace_back(buffer, std::move(values));
    read.push_back(buffer);
    return buffer;
  }
  [[nodiscard]] std::vector<Numbers> on(bool device) const { return sg::testing::run_graph(graph, set, read, device); }
};

}  // namespace

TEST_CASE("a sum of squares has the same limbs on a device", "[ops][cuda]") {
  const auto type = GENERATE(sg::DType::f32, sg::DType::f64, sg::DType::bf16, sg::DType::f16);
  // One thread block, several, and several tiles; whole vectors and none.
  const Places places = GENERATE(Places{1}, Places{77}, Places{768}, Places{8'192}, Places{8'193}, Places{100'003},
                                 Places{4'096, 64}, Places{66'048, 2'064}, Places{35'007, 7});
  const int spread    = GENERATE(0, 12, 60);  // powers of two between the smallest and the largest
  if (sg::testing::sanitized() && spread < 60) return;
  CAPTURE(static_cast<int>(type), places.count, places.length, spread);
  Run run;
  Numbers values = some(places.room(), 1);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = std::ldexp(values[i], type == sg::DType::f16 ? 0 : -static_cast<int>(i * i % 101) * spread / 100);
    if (i % 13 == 5) values[i] = 0;
  }
  const sg::Buffer of  = run.add("values", type, values);
  const sg::Buffer sum = run.add("sum", sg::DType::i64, Numbers(static_cast<std::size_t>(sg::exact_sum_size(type)), 3));
  sg::square_sum(run.graph, {.name = "squares", .values = places.of(of, type), .sum = sum});
  const auto device = run.on(true), host = run.on(false);
  CHECK(device[1] == host[1]);
}

TEST_CASE("sums of squares of the largest and smallest numbers, infinities and NaNs are the same on a device",
          "[ops][cuda]") {
  const bool finite   = GENERATE(true, false);
  constexpr float big = std::numeric_limits<float>::max(), small = std::numeric_limits<float>::denorm_min();
  Run run;
  Numbers values = some(5000, 2);
  for (std::size_t i = 0; i < 2000; i += 7) values[i] = (i % 2 == 0 ? big : small);
  for (std::size_t i = 3000; i < 4000; ++i) values[i] = static_cast<double>(small) * static_cast<double>(i % 100);
  if (!finite) values[17] = values[4999] = std::numeric_limits<double>::infinity();
  if (!finite) values[2500] = std::numeric_limits<double>::quiet_NaN();
  const sg::Buffer of  = run.add("values", sg::DType::f32, values);
  const sg::Buffer sum = run.add("sum", sg::DType::i64, Numbers(20, 0));
  sg::square_sum(run.graph, {.name = "squares", .values = of, .sum = sum});
  const auto device = run.on(true), host = run.on(false);
  CHECK(device[1] == host[1]);
}

TEST_CASE("squares of numbers of every exponent are the same on a device", "[ops][cuda]") {
  // Varying mantissas, with all or few bits set; a largest number beside the smallest; infinities and NaNs.
  const auto [count, specials] = GENERATE(std::pair{5'000, 0}, std::pair{70'001, 0}, std::pair{70'001, 9});
  CAPTURE(count, specials);
  Run run;
  Numbers values;
  for (int i = 0; i < count; ++i) {
    const auto bits     = sg::testing::mix(static_cast<std::uint64_t>(i));
    const auto exponent = static_cast<std::uint32_t>(bits % 255) << 23;
    const auto fraction = i % 3 == 0 ? 0x7fffffu : static_cast<std::uint32_t>(bits >> 41);
    const auto sign     = static_cast<std::uint32_t>(bits >> 40 & 1) << 31;
    values.push_back(static_cast<double>(std::bit_cast<float>(sign | exponent | fraction)));
  }
  for (int i = 0; i < specials; ++i) {
    values[static_cast<std::size_t>(i * 7001)] =
        i % 3 == 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  }
  const sg::Buffer of  = run.add("values", sg::DType::f32, values);
  const sg::Buffer sum = run.add("sum", sg::DType::i64, Numbers(20, 0));
  sg::square_sum(run.graph, {.name = "squares", .values = of, .sum = sum});
  const auto device = run.on(true), host = run.on(false);
  CHECK(device[1] == host[1]);
}

#if defined(STEPGRAPH_WITH_CUDA)
TEST_CASE("sums of squares on a device have the same bits without clusters of blocks", "[ops][cuda]") {
  const std::int64_t count = GENERATE(9000, 32768, 100'003);  // part of a tile, a tile, several
  CAPTURE(count);
  Run run;
  Numbers values = some(count, 5);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::ldexp(values[i], static_cast<int>(i % 61) - 30);
  const sg::Buffer of = run.add("values", sg::DType::f32, values);
  std::vector<sg::Buffer> sums;
  for (const bool clusters : {true, false}) {
    sums.push_back(run.add(clusters ? "with" : "without", sg::DType::i64, Numbers(20, 0)));
    run.graph.add({.name = "squares", .reads = of, .accumulates = sums.back(), .device = true},
                  [clusters, count](const sg::Context& c) {
                    sg::cuda::add_squares<float>(*c.device(), {c.read<float>().data(), count, count, 1},
                                                 c.accumulate<std::int64_t>().data(), clusters);
                  });
  }
  const auto found = run.on(true);
  CHECK(found[1] == found[2]);
}
#endif

TEST_CASE("norm and clip factor have the same bits on a device", "[ops][cuda]") {
  const auto type   = GENERATE(sg::DType::f32, sg::DType::f64);
  const bool scaled = GENERATE(false, true);
  const int size    = GENERATE(-40, 0, 30, 1000);  // 1000: infinite in f32
  CAPTURE(static_cast<int>(type), scaled, size);
  Run run;
  Numbers values = some(3001, 3);
  for (double& value : values) value = std::ldexp(value, size == 1000 && type == sg::DType::f64 ? 100 : size);
  const sg::Buffer of  = run.add("values", type, values);
  const sg::Buffer sum = run.add("sum", sg::DType::i64, Numbers(static_cast<std::size_t>(sg::exact_sum_size(type)), 0));
  const sg::Buffer norm = run.add("norm", sg::DType::f64, {0}), factor = run.add("factor", sg::DType::f64, {0}),
                   scale    = run.add("scale", sg::DType::f64, {1024}),
                   overflow = run.add("overflow", sg::DType::i64, {7});
  sg::square_sum(run.graph, {.name = "squares", .values = of, .sum = sum});
  sg::ClipFactor clip{.squares = sum, .type = type, .norm = norm, .factor = factor, .clip = 1};
  if (scaled) {
    clip.scale    = scale;
    clip.overflow = overflow;
  }
  sg::clip_factor(run.graph, clip);
  const auto device = run.on(true), host = run.on(false);
  for (std::size_t i = 1; i < host.size(); ++i) {
    CAPTURE(i);
    // NaN on one side means NaN on the other.
    CHECK((device[i] == host[i] || (std::isnan(device[i][0]) && std::isnan(host[i][0]))));
  }
}

TEST_CASE("an update of weights on a device has the bits of that on the CPU", "[ops][cuda]") {
  sg::testing::need_device();
  struct Types {
    sg::DType weight, gradient;
    std::optional<sg::DType> value = {};
  };
  const Types types = GENERATE(Types{sg::DType::f32, sg::DType::f32}, Types{sg::DType::f64, sg::DType::f64},
                               Types{sg::DType::f32, sg::DType::f32, sg::DType::bf16},
                               Types{sg::DType::f32, sg::DType::bf16, sg::DType::bf16},
                               Types{sg::DType::f32, sg::DType::f16, sg::DType::f16});
  struct Case {
    Places places;
    double skip   = -1;  // -1: none
    double factor = 0.25;
  };
  // Not a multiple of a vector; rows of whole vectors; rows of 7; several iterations per block.
  const auto [places, skip, scaled] =
      GENERATE(Case{{5003}}, Case{{5003}, 0}, Case{{5003}, 1}, Case{{4096, 64}}, Case{{4096, 64}, 1}, Case{{4200, 7}},
               Case{{4200, 7}, 1}, Case{{2'100'003}}, Case{{600'003}, 1}, Case{{5003}, -1, std::nan("")});
  const bool adamw = GENERATE(true, false);
  if (sg::testing::sanitized() && places.count > 10'000 && types.gradient != sg::DType::f32) return;
  CAPTURE(static_cast<int>(types.gradient), types.value.has_value(), places.count, places.length, skip, scaled, adamw);
  Run run;
  const std::int64_t room = places.room();
  Numbers second          = some(room, 4);
  for (double& value : second) value *= value;
  const sg::Access weight   = places.of(run.add("weight", types.weight, some(room, 5)), types.weight),
                   gradient = places.of(run.add("gradient", types.gradient, some(room, 6)), types.gradient),
                   first    = places.of(run.add("first", types.weight, some(room, 7)), types.weight),
                   squares  = places.of(run.add("second", types.weight, second), types.weight),
                   factor = run.add("factor", sg::DType::f64, {scaled}), rate = run.add("rate", sg::DType::f64, {0.01}),
                   step  = run.add("step", sg::DType::i64, {skip == 0 ? 12'345.0 : 3.0}),
                   skips = run.add("skip", sg::DType::i64, {skip});
  std::optional<sg::Access> value, may_skip;
  if (types.value) value = places.of(run.add("value", *types.value, some(room, 8)), *types.value);
  if (skip >= 0) may_skip = skips;
  if (adamw) {
    sg::adamw(run.graph, {.name         = "adamw",
                          .weight       = weight,
                          .gradient     = gradient,
                          .first        = first,
                          .second       = squares,
                          .factor       = factor,
                          .rate         = rate,
                          .step         = step,
                          .weight_decay = 0.1,
                          .value        = value,
                          .skip         = may_skip});
  } else {
    sg::sgd(run.graph, {.name         = "sgd",
                        .weight       = weight,
                        .gradient     = gradient,
                        .velocity     = first,
                        .factor       = factor,
                        .rate         = rate,
                        .momentum     = 0.9,
                        .weight_decay = 0.1,
                        .value        = value,
                        .skip         = may_skip});
  }
  const auto device = run.on(true), host = run.on(false);
  for (std::size_t i = 0; i < host.size(); ++i) {
    if (i == factor.buffer.id && std::isnan(scaled)) continue;  // no node writes it
    CAPTURE(i);
    CHECK((device[i] == host[i]));
  }
}

TEST_CASE("a loss scale changes on a device as on the CPU", "[ops][cuda]") {
  const double overflow = GENERATE(0, 1), good = GENERATE(5, 6);
  const bool dynamic = GENERATE(true, false);
  CAPTURE(overflow, good, dynamic);
  Run run;
  const sg::Buffer overflows = run.add("overflow", sg::DType::i64, {overflow}),
                   scale = run.add("scale", sg::DType::f64, {512}), steps = run.add("good", sg::DType::i64, {good}),
                   updates = run.add("updates", sg::DType::i64, {40});
  sg::update_loss_scale(run.graph, {.overflow     = overflows,
                                    .scale        = scale,
                                    .good_steps   = steps,
                                    .num_updates  = updates,
                                    .dynamic      = dynamic,
                                    .growth_steps = 7});
  const auto device = run.on(true), host = run.on(false);
  CHECK(device == host);
}
