#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <limits>

#include "backends/loopback/world.hpp"
#include "engine/run/executor.hpp"
#include "ops/transfers/compress.hpp"
#include "ops/transfers/offload_copy.hpp"
#include "tests/support/ops/device_case.hpp"
#include "tests/support/ops/elements.hpp"

namespace sg = stepgraph;
using sg::Compression;
using sg::DType;

namespace {

using Bytes = std::vector<std::byte>;

// Any bits: numbers of every size, subnormal ones, infinities and NaNs. Or numbers of some decades.
Bytes some_elements(DType type, std::int64_t count, bool any_bits) {
  const std::size_t size = sg::size_bytes(type);
  Bytes made(static_cast<std::size_t>(count) * size);
  for (std::size_t i = 0; i < made.size() / size; ++i) {
    const std::uint64_t bits = sg::testing::mix(i + 1);
    const double power       = std::pow(10.0, -7.5 * static_cast<double>(bits >> 20) * 0x1p-44);
    sg::testing::encode(type, bits % 2 == 0 ? power : -power, made.data() + i * size);
    if (!any_bits) continue;
    for (std::size_t k = 0; k < size; ++k) made[i * size + k] = static_cast<std::byte>(bits >> (8 * k));
  }
  return made;
}

struct Case {
  Compression kind;
  DType type;
  std::int64_t count;
  std::int64_t raw_offset = 0, packed_offset = 0;  // elements, bytes
};

// Compresses and decompresses on a device or on the CPU. Returns the packed bytes and the elements that came back.
std::pair<Bytes, Bytes> run(const Case& of, const Bytes& given, bool on_device) {
  const auto size          = static_cast<std::int64_t>(sg::size_bytes(of.type));
  const std::int64_t bytes = sg::compressed_bytes(of.kind, of.type, of.count);
  sg::Graph graph;
  const auto made = [&](std::int64_t space, DType type) {
    return graph.buffer({.size_bytes = space, .type = type, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer raw   = made((of.raw_offset + of.count) * size, of.type),
                   small = made(of.packed_offset + bytes, DType::u8),
                   back  = made((of.raw_offset + of.count) * size, of.type);
  const auto part        = [&](sg::Buffer whole) { return whole.range(of.raw_offset * size, of.count * size); };
  const sg::Access kept  = small.range(of.packed_offset, bytes);
  sg::compress(graph, {.name = "compress", .kind = of.kind, .packed = kept, .raw = part(raw)});
  sg::decompress(graph, {.name = "decompress", .kind = of.kind, .packed = kept, .raw = part(back)});
  const std::unique_ptr<sg::World> world =
      on_device ? sg::testing::device_world() : std::make_unique<sg::LoopbackWorld>(1);
  const sg::Program program(graph, *world);
  program.memory().write(raw, std::span<const std::byte>(given), of.raw_offset * size);
  sg::Executor executor({.threads = 2});
  executor.run(program);
  Bytes packed(static_cast<std::size_t>(bytes)), elements(given.size());
  program.memory().read(small, std::span(packed), of.packed_offset);
  program.memory().read(back, std::span(elements), of.raw_offset * size);
  return {packed, elements};
}

}  // namespace

TEST_CASE("compression on a device has the CPU's bits", "[ops][cuda][compress]") {
  sg::testing::need_device();
  Case of;
  of.kind = GENERATE(Compression::none, Compression::fp16, Compression::bf16, Compression::int8, Compression::dynamic8);
  of.type = GENERATE(DType::f32, DType::f64, DType::bf16, DType::f16);
  of.count = GENERATE(1, 255, 256, 259, 100'003, 1'048'576);
  // Aligned to vectors, and not.
  of.raw_offset    = GENERATE(0, 1);
  of.packed_offset = of.raw_offset * 4;
  const bool any   = GENERATE(false, true);
  CAPTURE(sg::to_string(of.kind), of.type, of.count, of.raw_offset, any);
  const Bytes given = some_elements(of.type, of.count, any);
  const auto device = run(of, given, true), host = run(of, given, false);
  CHECK((device.first == host.first));
  CHECK((device.second == host.second));
}

TEST_CASE("bytes go down to pinned memory and up again, beside compression on a device", "[ops][cuda][offload_copy]") {
  sg::testing::need_device();
  constexpr std::int64_t count = 500'001;
  const std::int64_t bytes     = sg::compressed_bytes(Compression::int8, DType::f32, count);
  sg::Graph graph;
  const auto made = [&](std::int64_t size, DType type, sg::Space space) {
    return graph.buffer({.size_bytes = size, .type = type, .space = space, .lifetime = sg::Lifetime::persistent});
  };
  const sg::Buffer raw   = made(4 * count, DType::f32, sg::Space::device),
                   small = made(bytes, DType::u8, sg::Space::device), home = made(bytes, DType::u8, sg::Space::pinned),
                   slot = made(bytes, DType::u8, sg::Space::device),
                   back = made(4 * count, DType::f32, sg::Space::device);
  sg::compress(graph, {.name = "compress", .kind = Compression::int8, .packed = small, .raw = raw});
  sg::offload_copy(graph, {.name = "down", .lane = sg::LaneKind::d2h, .to = home, .from = small});
  sg::offload_copy(graph, {.name = "up", .lane = sg::LaneKind::h2d, .to = slot, .from = home});
  sg::decompress(graph, {.name = "decompress", .kind = Compression::int8, .packed = slot, .raw = back});
  const Bytes given = some_elements(DType::f32, count, false);
  const auto run_on = [&](std::unique_ptr<sg::World> world) {
    const sg::Program program(graph, *world);
    program.memory().write(raw, std::span<const std::byte>(given));
    sg::Executor executor({.threads = 2});
    executor.run(program);
    executor.run(program);  // captured
    Bytes elements(given.size());
    program.memory().read(back, std::span(elements));
    return elements;
  };
  CHECK((run_on(sg::testing::device_world()) == run_on(std::make_unique<sg::LoopbackWorld>(1))));
}
