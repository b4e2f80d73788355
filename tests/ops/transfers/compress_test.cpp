#include "ops/transfers/compress.hpp"

#include <algorithm>
#include <bit>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/enumerators.hpp"
#include "tests/support/ops/elements.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::Compression;
using sg::DType;

namespace {

constexpr std::array float_types{DType::f32, DType::f64, DType::bf16, DType::f16};
constexpr std::array eight_bits{Compression::int8, Compression::dynamic8};

double fraction(std::uint64_t i) { return static_cast<double>(sg::testing::mix(i) >> 11) * 0x1p-53; }

// Numbers of both signs over `decades` decades below `largest`.
std::vector<double> numbers(std::int64_t count, double decades, double largest, std::uint64_t seed) {
  std::vector<double> made;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t at = seed * 10'000'019 + 2 * static_cast<std::uint64_t>(i);
    const double size      = largest * std::pow(10.0, -decades * fraction(at));
    made.push_back(sg::testing::mix(at + 1) % 2 == 0 ? size : -size);
  }
  return made;
}

std::vector<std::byte> elements(DType type, const std::vector<double>& values) {
  const std::size_t size = sg::size_bytes(type);
  std::vector<std::byte> made(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) sg::testing::encode(type, values[i], made.data() + i * size);
  return made;
}
std::vector<double> values_of(DType type, const std::vector<std::byte>& bytes) {
  const std::size_t size = sg::size_bytes(type);
  std::vector<double> made;
  for (std::size_t i = 0; i < bytes.size() / size; ++i)
    made.push_back(sg::testing::decode(type, bytes.data() + i * size));
  return made;
}

std::vector<std::byte> reserved(Compression kind, DType type, std::size_t raw_bytes) {
  const auto count = static_cast<std::int64_t>(raw_bytes / sg::size_bytes(type));
  return std::vector<std::byte>(static_cast<std::size_t>(sg::compressed_bytes(kind, type, count)));
}
std::vector<std::byte> packed(Compression kind, DType type, const std::vector<std::byte>& raw) {
  std::vector<std::byte> made = reserved(kind, type, raw.size());
  sg::compress(kind, type, raw, made);
  return made;
}
std::vector<std::byte> there_and_back(Compression kind, DType type, const std::vector<std::byte>& raw) {
  std::vector<std::byte> back(raw.size(), std::byte{0x5a});
  sg::decompress(kind, type, packed(kind, type, raw), back);
  return back;
}
std::vector<double> there_and_back(Compression kind, DType type, const std::vector<double>& values) {
  return values_of(type, there_and_back(kind, type, elements(type, values)));
}

float scale_of(const std::vector<std::byte>& bytes, std::int64_t block) {
  float scale;
  std::memcpy(&scale, bytes.data() + 260 * block, sizeof(scale));
  return scale;
}

// Half a unit in the last place of a type at a number.
double rounding(DType type, double at) {
  const int digits = type == DType::f16 ? 11 : type == DType::bf16 ? 8 : type == DType::f32 ? 24 : 53;
  return std::ldexp(std::abs(at), -digits);
}

// Bytes that are hard and easy to compress, and both in turn.
std::vector<std::byte> any_bytes(std::int64_t count, int pattern) {
  std::vector<std::byte> made(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < made.size(); ++i) {
    const bool hard = pattern == 0 || (pattern == 2 && i / 50'000 % 2 == 0);
    made[i]         = static_cast<std::byte>(hard ? sg::testing::mix(i) : pattern == 1 ? 0 : i / 1000);
  }
  return made;
}

}  // namespace

TEST_CASE("compressed sizes, ratios and budgets are functions of kind and type", "[ops][compress]") {
  CHECK(sg::compressed_bytes(Compression::none, DType::f32, 1000) == 4000);
  CHECK(sg::compressed_bytes(Compression::fp16, DType::f32, 1000) == 2000);
  CHECK(sg::compressed_bytes(Compression::bf16, DType::f64, 1000) == 2000);
  CHECK(sg::compressed_bytes(Compression::int8, DType::f32, 1000) == 1016);
  CHECK(sg::compressed_bytes(Compression::dynamic8, DType::bf16, 1024) == 1040);
  CHECK(sg::compressed_bytes(Compression::int8, DType::f32, 0) == 0);
  CHECK(sg::compressed_bytes(Compression::lossless, DType::f32, 16'384) == 65'536 + 8);
  CHECK(sg::compressed_bytes(Compression::lossless, DType::f32, 16'385) == 65'540 + 16);
  CHECK_THROWS_AS(sg::compressed_bytes(Compression::int8, DType::f32, -1), sg::Error);

  CHECK(sg::compression_ratio(Compression::fp16, DType::f32) == 0.5);
  CHECK(sg::compression_ratio(Compression::fp16, DType::f64) == 0.25);
  CHECK(sg::compression_ratio(Compression::int8, DType::f32) == 260.0 / 1024);
  CHECK(sg::compression_ratio(Compression::dynamic8, DType::bf16) == 260.0 / 512);
  CHECK(sg::compression_ratio(Compression::lossless, DType::f32) == 1);
  CHECK(sg::compression_ratio(Compression::none, DType::f32) == 1);

  CHECK(sg::effective_budget(1000, Compression::bf16, DType::f32) == 2000);
  CHECK(sg::effective_budget(260, Compression::int8, DType::f32) == 1024);
  CHECK(sg::effective_budget(0, Compression::int8, DType::f32) == 0);
  CHECK(sg::effective_budget(1234, Compression::lossless, DType::f32) == 1234);
  for (const Compression kind : sg::all_compressions) {
    for (const DType type : sg::testing::all_types) {
      constexpr std::int64_t many = 1 << 20;
      const double raw            = static_cast<double>(many) * static_cast<double>(sg::size_bytes(type));
      const auto bytes            = static_cast<double>(sg::compressed_bytes(kind, type, many));
      CHECK(std::abs(bytes / raw / sg::compression_ratio(kind, type) - 1) < 2e-3);
    }
  }
}

TEST_CASE("a kind that saves nothing for a type is none", "[ops][compress]") {
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const Compression kind : {Compression::fp16, Compression::bf16}) {
      CHECK(sg::effective(kind, type) == Compression::none);
      CHECK_FALSE(sg::is_lossy(kind, type));
    }
    CHECK(sg::effective(Compression::int8, type) == Compression::int8);
  }
  for (const DType type : {DType::u8, DType::i32, DType::i64}) {
    CHECK(sg::effective(Compression::dynamic8, type) == Compression::none);
    CHECK(sg::effective(Compression::lossless, type) == Compression::lossless);
  }
  CHECK(sg::is_lossy(Compression::bf16, DType::f32));
  CHECK(sg::is_lossy(Compression::dynamic8, DType::f64));
  CHECK_FALSE(sg::is_lossy(Compression::lossless, DType::f32));
  CHECK_FALSE(sg::is_lossy(Compression::none, DType::f32));
  CHECK(sg::to_string(Compression::dynamic8) == "dynamic8");
}

TEST_CASE("fp16 and bf16 have the nearest number of their type", "[ops][compress]") {
  const auto type = GENERATE(DType::f32, DType::f64);
  const auto raw  = elements(type, numbers(30'011, 6, 100, 1));
  for (const auto& [kind, half] :
       {std::pair{Compression::fp16, DType::f16}, std::pair{Compression::bf16, DType::bf16}}) {
    const auto expected =
        values_of(half, elements(half, values_of(DType::f32, elements(DType::f32, values_of(type, raw)))));
    CHECK((values_of(type, there_and_back(kind, type, raw)) == expected));
  }
}

TEST_CASE("int8 is off by half of its scale at most", "[ops][compress]") {
  const auto type          = GENERATE(from_range(float_types));
  const std::int64_t count = GENERATE(1, 255, 256, 257, 5000);
  const double largest     = type == DType::f16 ? 100 : GENERATE(100.0, 1e-30, 1e37);
  CAPTURE(type, count, largest);
  const auto raw   = elements(type, numbers(count, 3, largest, 2));
  const auto bytes = packed(Compression::int8, type, raw);
  const auto given = values_of(type, raw), back = values_of(type, there_and_back(Compression::int8, type, raw));
  for (std::size_t i = 0; i < given.size(); ++i) {
    const double scale = static_cast<double>(scale_of(bytes, static_cast<std::int64_t>(i) / 256));
    const double error = std::abs(back[i] - given[i]), most = 0.50001 * scale + rounding(type, back[i]);
    if (error > most) FAIL("element " << i << ": " << given[i] << " became " << back[i] << ", scale " << scale);
  }
  const auto first = given.begin(), last = given.begin() + std::min<std::int64_t>(count, 256);
  const double most =
      std::abs(*std::max_element(first, last, [](double a, double b) { return std::abs(a) < std::abs(b); }));
  CHECK(static_cast<double>(scale_of(bytes, 0)) == static_cast<double>(static_cast<float>(most) / 127.0f));
}

TEST_CASE("dynamic8 is off by what its header says, in each decade below the largest number", "[ops][compress]") {
  const auto type      = GENERATE(from_range(float_types));
  const double largest = type == DType::f16 ? 1000 : GENERATE(1.0, 1e-20, 3e38);
  CAPTURE(type, largest);
  std::vector<double> given = numbers(256 * 400, 7.5, largest, 3);
  for (std::size_t i = 0; i < given.size(); i += 256) given[i] = i % 512 == 0 ? largest : -largest;
  given           = values_of(type, elements(type, given));
  const auto back = there_and_back(Compression::dynamic8, type, given);
  // Of each decade: the largest error relative to the number.
  std::array<double, 8> worst{};
  for (std::size_t i = 0; i < given.size(); ++i) {
    const double share = std::abs(given[i]) / std::abs(given[i / 256 * 256]);
    const auto decade  = static_cast<std::size_t>(std::clamp(-std::log10(share), 0.0, 7.0));
    worst[decade]      = std::max(worst[decade], std::abs(back[i] - given[i]) / std::abs(given[i]));
    if (share < 4.9e-7 && back[i] != 0) FAIL("element " << i << ": " << given[i] << " became " << back[i]);
    if (back[i] * given[i] < 0) FAIL("element " << i << " changed its sign");
    if (share == 1 && static_cast<float>(back[i]) != static_cast<float>(given[i]))
      FAIL("the largest element " << given[i] << " became " << back[i]);
  }
  // Half a step is 0.45 / 2^p of a decade that ends at 1 and has 2^p numbers. The worst number lies above its begin.
  const double slack = type == DType::bf16 ? 0.005 : type == DType::f16 ? 0.001 : 1e-6;
  for (std::size_t decade = 0; decade < 4; ++decade) {
    CAPTURE(decade, worst[decade]);
    const double half = 0.45 / static_cast<double>(64 >> decade), bound = half / (0.1 + half);
    if (type == DType::f16 && decade == 3) continue;  // its numbers are too coarse there
    CHECK(worst[decade] <= bound + slack);
    CHECK(worst[decade] >= 0.9 * bound);  // it is no larger than needed
  }
}

TEST_CASE("dynamic8 has each of its numbers exactly", "[ops][compress]") {
  // All codes but that of NaN, with scale 1, in one block of 255 elements.
  std::vector<std::byte> bytes = reserved(Compression::dynamic8, DType::f32, 255 * 4);
  const float one              = 1;
  std::memcpy(bytes.data(), &one, sizeof(one));
  for (int code = 0; code < 255; ++code)
    bytes[4 + static_cast<std::size_t>(code)] = static_cast<std::byte>(code < 128 ? code : code + 1);
  std::vector<std::byte> raw(255 * 4);
  sg::decompress(Compression::dynamic8, DType::f32, bytes, raw);
  const auto values = values_of(DType::f32, raw);
  CHECK(values[0] == 0);
  CHECK(values[127] == 1);
  for (std::size_t i = 1; i < 128; ++i) {
    CHECK(values[i] > values[i - 1]);
    CHECK(values[127 + i] == -values[i]);
  }
  CHECK((packed(Compression::dynamic8, DType::f32, raw) == bytes));
}

TEST_CASE("numbers that are not finite come back so where they were, and change no other", "[ops][compress]") {
  const auto type = GENERATE(from_range(float_types));
  const auto kind = GENERATE(Compression::fp16, Compression::bf16, Compression::int8, Compression::dynamic8);
  CAPTURE(type, sg::to_string(kind));
  std::vector<double> given = numbers(700, 2, 10, 4);
  const auto clean          = there_and_back(kind, type, given);
  constexpr double infinite = std::numeric_limits<double>::infinity();
  given[3] = given[256] = std::numeric_limits<double>::quiet_NaN();
  given[4] = given[699] = infinite;
  given[300]            = -infinite;
  std::size_t lost      = 0;
  const auto back       = there_and_back(kind, type, given);
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (std::isfinite(given[i]) != std::isfinite(back[i])) FAIL("element " << i << " became " << back[i]);
    lost += std::isfinite(given[i]) && back[i] != clean[i];
  }
  // Only where the largest number of a block was replaced would others differ.
  CHECK(lost == 0);
  std::vector<double> none(300, std::numeric_limits<double>::quiet_NaN());
  for (const double value : there_and_back(kind, type, none)) CHECK_FALSE(std::isfinite(value));
}

TEST_CASE("zeros, the smallest and the largest numbers survive 8 bits", "[ops][compress]") {
  const auto kind = GENERATE(from_range(eight_bits));
  CAPTURE(sg::to_string(kind));
  const std::vector<double> zeros(300, 0.0);
  CHECK((there_and_back(kind, DType::f32, zeros) == zeros));
  constexpr auto most  = static_cast<double>(std::numeric_limits<float>::max());
  constexpr auto least = static_cast<double>(std::numeric_limits<float>::denorm_min());
  std::vector<double> large{most, -most, 0, most / 2};
  const auto back = there_and_back(kind, DType::f32, large);
  CHECK(std::abs(back[0] - most) <= 1e-6 * most);
  CHECK(back[1] == -back[0]);
  CHECK(std::abs(back[3] - most / 2) <= 0.01 * most);
  for (const double value : there_and_back(kind, DType::f32, std::vector<double>{least, -3 * least})) {
    CHECK(std::abs(value) < 1e-37);
  }
  // Packed bytes that were never written are zeros.
  for (const Compression each : sg::all_compressions) {
    if (!sg::is_built(each)) continue;
    std::vector<std::byte> raw(70'000 * 4, std::byte{1});
    sg::decompress(each, DType::f32, reserved(each, DType::f32, raw.size()), raw);
    CHECK(std::all_of(raw.begin(), raw.end(), [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST_CASE("lossless gives every bit back and never needs more than it reserves", "[ops][compress]") {
  if (!sg::is_built(Compression::lossless)) SKIP("built without lz4");
  const auto type          = GENERATE(from_range(sg::testing::all_types));
  const std::int64_t count = GENERATE(0, 1, 8191, 16'384, 65'536, 100'003);
  const int pattern        = GENERATE(0, 1, 2, 3);
  static int seen          = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(type, count, pattern);
  const auto raw              = any_bytes(count * static_cast<std::int64_t>(sg::size_bytes(type)), pattern);
  std::vector<std::byte> made = reserved(Compression::lossless, type, raw.size()), back(raw.size());
  const std::int64_t used     = sg::compress(Compression::lossless, type, raw, made);
  CHECK(used <= std::ssize(made));
  CHECK(used == sg::used_bytes(Compression::lossless, type, count, made));
  if (pattern == 0) CHECK(used == std::ssize(made));           // random bytes
  if (pattern == 1 && count > 8000) CHECK(used < count / 10);  // zeros
  std::fill(made.begin() + used, made.end(), std::byte{0xee});
  sg::decompress(Compression::lossless, type, made, back);
  CHECK((raw == back));
}

TEST_CASE("lossless saves bytes of numbers of similar size", "[ops][compress]") {
  if (!sg::is_built(Compression::lossless)) SKIP("built without lz4");
  const auto raw              = elements(DType::f32, numbers(200'000, 0.1, 1, 5));
  std::vector<std::byte> made = reserved(Compression::lossless, DType::f32, raw.size());
  const auto used             = sg::compress(Compression::lossless, DType::f32, raw, made);
  CHECK(used < std::ssize(raw) * 95 / 100);
}

TEST_CASE("damaged packed bytes are an error", "[ops][compress][refuses]") {
  if (!sg::is_built(Compression::lossless)) SKIP("built without lz4");
  const auto raw = any_bytes(200'000, 3);
  std::vector<std::byte> back(raw.size());
  const auto damaged = [&](std::size_t at, int value) {
    auto bytes = packed(Compression::lossless, DType::u8, raw);
    bytes[at]  = static_cast<std::byte>(value);
    CHECK_THROWS_MATCHES(sg::decompress(Compression::lossless, DType::u8, bytes, back), sg::Error,
                         MessageMatches(ContainsSubstring("the packed bytes are damaged")));
  };
  damaged(7, 0x80);   // a negative end
  damaged(5, 0x01);   // an end far behind
  damaged(32, 0x00);  // the first byte of the first block
}

TEST_CASE("compression outside of graphs refuses sizes that do not fit", "[ops][compress][refuses]") {
  std::vector<std::byte> raw(1024), made(260);
  CHECK_THROWS_MATCHES(sg::compress(Compression::int8, DType::f32, raw, std::span(made).first(259)), sg::Error,
                       MessageMatches(ContainsSubstring("256 elements of f32 as int8 in 259 bytes (260)")));
  CHECK_THROWS_MATCHES(sg::compress(Compression::int8, DType::f32, std::span(raw).first(1023), made), sg::Error,
                       MessageMatches(ContainsSubstring("1023 bytes are not whole elements of f32")));
  CHECK_THROWS_AS(sg::decompress(Compression::fp16, DType::f32, made, raw), sg::Error);
}

TEST_CASE("a node has the bits of the function, for any number of threads", "[ops][compress]") {
  const auto kind  = GENERATE(from_range(sg::all_compressions));
  const auto space = GENERATE(sg::Space::pinned, sg::Space::device);
  if (kind == Compression::lossless && (!sg::is_built(kind) || space == sg::Space::device)) return;
  const int threads            = GENERATE(1, 3);
  const auto type              = kind == Compression::fp16 ? DType::f64 : GENERATE(DType::f32, DType::bf16);
  constexpr std::int64_t count = 100'037;
  static int seen              = 0;
  if (sg::testing::left_out(seen, 3)) return;
  CAPTURE(sg::to_string(kind), space, threads, type);
  const auto size          = static_cast<std::int64_t>(sg::size_bytes(type));
  const std::int64_t bytes = sg::compressed_bytes(kind, type, count);
  sg::Graph graph;
  const auto made = [&](const char* name, std::int64_t of, DType element) {
    return graph.buffer(
        {.name = name, .size_bytes = of, .type = element, .space = space, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer raw = made("raw", (count + 3) * size, type), small = made("packed", bytes + 12, DType::u8),
                   back = made("back", count * size, type);
  const sg::Node down   = sg::compress(
        graph,
        {.name = "compress", .kind = kind, .packed = small.range(12, bytes), .raw = raw.range(2 * size, count * size)});
  const sg::Node up = sg::decompress(
      graph, {.name = "decompress", .lane = {}, .kind = kind, .packed = small.range(12, bytes), .raw = back});
  CHECK(graph.kind(down) == (space == sg::Space::pinned ? sg::NodeKind::host : sg::NodeKind::compute));
  CHECK(graph.device(up) == (space == sg::Space::device));
  CHECK(graph.cost(up).bytes_moved == static_cast<double>(bytes + count * size));
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = threads});
  const sg::Program program(graph, world);
  const auto given = elements(type, numbers(count + 3, 4, 2, 6));
  std::copy(given.begin(), given.end(), program.memory().span<std::byte>(raw).begin());
  executor.run(program);
  const std::vector<std::byte> part(given.begin() + 2 * size, given.begin() + (count + 2) * size);
  const auto expected = packed(kind, type, part);
  const auto used     = static_cast<std::size_t>(sg::used_bytes(kind, type, count, expected));
  const auto got      = program.memory().span<std::byte>(small).subspan(12);
  CHECK(std::memcmp(got.data(), expected.data(), used) == 0);
  const auto result = program.memory().span<std::byte>(back);
  CHECK((std::vector<std::byte>(result.begin(), result.end()) == there_and_back(kind, type, part)));
}

TEST_CASE("nodes that compress refuse buffers that do not fit", "[ops][compress][refuses]") {
  sg::Graph graph;
  const auto made = [&](std::int64_t size, DType type, sg::Space space) {
    return graph.buffer({.name = "b", .size_bytes = size, .type = type, .space = space});
  };
  const sg::Buffer raw = made(1024, DType::f32, sg::Space::device), small = made(264, DType::u8, sg::Space::device),
                   host = made(260, DType::u8, sg::Space::pinned), words = made(260, DType::i32, sg::Space::device);
  const auto refuses = [&](const sg::Access& bytes, const sg::Access& of, const char* text,
                           Compression kind = Compression::int8) {
    CHECK_THROWS_MATCHES(sg::compress(graph, {.name = "c", .kind = kind, .packed = bytes, .raw = of}), sg::Error,
                         MessageMatches(ContainsSubstring(text) && ContainsSubstring("compress 'c'")));
    CHECK_THROWS_MATCHES(sg::decompress(graph, {.name = "c", .kind = kind, .packed = bytes, .raw = of}), sg::Error,
                         MessageMatches(ContainsSubstring(text)));
  };
  refuses(small, raw, "256 elements of f32 as int8 in 264 bytes (260)");
  refuses(words, raw, "packed bytes in a buffer of i32 (u8)");
  refuses(small.range(2, 260), raw, "packed bytes begin at 2 (a multiple of 4)");
  refuses(small.range(0, 260), raw.range(2, 1020), "are not whole elements of f32");
  refuses(small.range(0, 260), raw.strided(0, 8, 16, 2), "(one range)");
  refuses(host, raw, "both in device, or both in pinned memory");
  if (sg::is_built(Compression::lossless)) {
    const sg::Buffer table = made(1032, DType::u8, sg::Space::device);
    refuses(table, raw, "lossless in device memory (pinned)", Compression::lossless);
  } else {
    refuses(small, raw, "lossless needs lz4", Compression::lossless);
  }
}
