#include "ops/transfers/hash.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstring>
#include <set>
#include <vector>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/run/executor.hpp"
#include "engine/verify/verify.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

std::vector<std::byte> noise(std::size_t size, std::uint32_t seed = 1) {
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) {
    seed = seed * 1664525u + 1013904223u;
    byte = static_cast<std::byte>(seed >> 24);
  }
  return bytes;
}

// The formula of the header, word by word.
std::uint64_t reference(const std::vector<std::byte>& bytes) {
  const auto m = [](std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  };
  std::uint64_t sum = m(bytes.size());
  for (std::size_t k = 0; 8 * k < bytes.size(); ++k) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + 8 * k, std::min<std::size_t>(8, bytes.size() - 8 * k));
    sum += m(word + (k + 1) * 0x9e3779b97f4a7c15u);
  }
  return sum;
}

}  // namespace

TEST_CASE("a hash follows its formula, for whole words and a tail", "[ops][hash]") {
  for (const std::size_t size : {0, 1, 7, 8, 9, 64, 1000, 1003}) {
    CAPTURE(size);
    CHECK(sg::hash_bytes(noise(size)) == reference(noise(size)));
  }
}

TEST_CASE("every flipped bit, moved word or added byte changes a hash", "[ops][hash]") {
  auto bytes = noise(75);
  std::set<std::uint64_t> seen{sg::hash_bytes(bytes)};
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    seen.insert(sg::hash_bytes(bytes));
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
  auto moved = bytes;
  std::swap_ranges(moved.begin(), moved.begin() + 8, moved.begin() + 16);
  seen.insert(sg::hash_bytes(moved));
  bytes.push_back(std::byte{0});
  seen.insert(sg::hash_bytes(bytes));
  CHECK(seen.size() == 8 * 75 + 3);
  CHECK(sg::hash_text(0x0123456789abcdefu) == "0123456789abcdef");
  CHECK(sg::join_hashes(sg::join_hashes(0, 1), 2) != sg::join_hashes(sg::join_hashes(0, 2), 1));
}

TEST_CASE("a node hashes several ranges, in tiles, to the same bits on any number of threads", "[ops][hash]") {
  const int threads = GENERATE(1, 3);
  sg::Graph graph;
  const auto buffer = [&](std::int64_t size, sg::DType type) {
    return graph.buffer({.size_bytes = size, .type = type, .lifetime = sg::Lifetime::persistent});
  };
  const std::size_t large = (1 << 20) + 12;  // several tiles and a tail
  const sg::Buffer a = buffer(large, sg::DType::f32), b = buffer(26, sg::DType::bf16),
                   hashes = buffer(24, sg::DType::i64);
  sg::hash_bytes(graph, {.name = "hash", .values = {a, b, a.range(4, 64)}, .hashes = hashes});
  sg::verify(graph);
  sg::LoopbackWorld world(1);
  sg::Executor executor({.threads = threads});
  const sg::Program program(graph, world);
  const auto in_a = noise(large), in_b = noise(26, 2);
  std::copy(in_a.begin(), in_a.end(), program.memory().bytes(a).begin());
  std::copy(in_b.begin(), in_b.end(), program.memory().bytes(b).begin());
  for (int again = 0; again < 2; ++again) {
    executor.run(program);
    const auto found = program.memory().span<std::uint64_t>(hashes);
    CHECK(found[0] == reference(in_a));
    CHECK(found[1] == reference(in_b));
    CHECK(found[2] == reference({in_a.begin() + 4, in_a.begin() + 68}));
  }
}

TEST_CASE("hashes without room, and hashes of strided accesses, are refused", "[ops][hash][refuses]") {
  sg::Graph graph;
  const sg::Buffer a      = graph.buffer({.name = "a", .size_bytes = 64, .type = sg::DType::f32});
  const sg::Buffer hashes = graph.buffer({.size_bytes = 8, .type = sg::DType::i64});
  CHECK_THROWS_WITH(sg::hash_bytes(graph, {.name = "h", .values = {a, a}, .hashes = hashes}),
                    "ops: hash_bytes 'h': 8 bytes of i64 for 2 hashes (one i64 for each)");
  CHECK_THROWS_WITH(sg::hash_bytes(graph, {.name = "h", .values = a, .hashes = a.range(0, 8)}),
                    ContainsSubstring("8 bytes of f32"));
  CHECK_THROWS_WITH(sg::hash_bytes(graph, {.name = "h", .values = a.strided(0, 4, 8, 2), .hashes = hashes}),
                    ContainsSubstring("of buffer 'a' (one range)"));
}
