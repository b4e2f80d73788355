#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <filesystem>

#include "backends/storage/spill_file.hpp"
#include "engine/plan/memory_peak.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/run/memory.hpp"
#include "engine/verify/verify.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("buffers on disk, and large ones in pinned memory, lie at whole blocks", "[engine][memory_plan]") {
  constexpr std::int64_t block = sg::Storage::block_bytes;
  constexpr auto pinned = sg::Space::pinned, disk = sg::Space::disk;
  constexpr auto kept = sg::Lifetime::persistent, step = sg::Lifetime::step;
  sg::Graph graph;
  const sg::Lane lane = graph.lane(sg::Rank{0}, sg::LaneKind::host);
  const auto buffer   = [&](const char* name, std::int64_t size, sg::Space space, sg::Lifetime lifetime) {
    return graph.buffer({.name = name, .size_bytes = size, .space = space, .lifetime = lifetime});
  };
  const sg::Buffer scalar = buffer("scalar", 8, pinned, kept), home = buffer("home", block + 1, pinned, kept),
                   other = buffer("other", 8, pinned, kept), slot = buffer("slot", 3 * block, pinned, step),
                   small = buffer("small", 100, pinned, step), next = buffer("next", 2 * block + 1, pinned, step),
                   file = buffer("file", 8, disk, kept), piece = buffer("piece", block, disk, step),
                   value = buffer("value", block + 1, sg::Space::device, kept);
  graph.add({.name = "a", .lane = lane, .reads = {scalar, home, other, file, value}, .writes = {slot, small}});
  graph.add({.name = "b", .lane = lane, .reads = {slot, small}, .writes = {next, piece}});
  graph.add({.name = "c", .lane = lane, .reads = {next, piece}});
  for (const auto reuse : {sg::Reuse::free, sg::Reuse::tight}) {
    const sg::MemoryPlan plan = sg::plan_memory(graph, {.reuse = reuse});
    sg::verify({graph, plan});
    CHECK(plan.offsets[home.id] == 0);
    CHECK(plan.offsets[scalar.id] == 2 * block);
    CHECK(plan.offsets[other.id] == 2 * block + 64);
    CHECK(plan.offsets[slot.id] % block == 0);
    CHECK(plan.offsets[next.id] % block == 0);
    CHECK(plan.offsets[file.id] == 0);
    CHECK(plan.offsets[piece.id] == block);
    const sg::ArenaPlan host = plan.arena(sg::Rank{0}, pinned), stored = plan.arena(sg::Rank{0}, disk);
    CHECK(host.persistent_bytes == 3 * block);
    CHECK(host.lower_bound == 3 * block + 6 * block + 128);  // at node b
    CHECK(host.size_bytes == host.lower_bound);
    CHECK(sg::memory_peak(graph, plan, sg::Rank{0}, pinned).bytes == host.lower_bound);
    CHECK(stored.size_bytes == 2 * block);
    CHECK(stored.lower_bound == 2 * block);
    CHECK(plan.arena(sg::Rank{0}).size_bytes == block + 64);  // device memory has the alignment of a cache line

    const auto bad = [&](sg::Buffer moved, std::int64_t by) {
      sg::MemoryPlan wrong = plan;
      wrong.offsets[moved.id] += by;
      wrong.arenas[1].size_bytes += block;
      return sg::find_flaws({graph, wrong});
    };
    CHECK(bad(other, 64).empty());
    REQUIRE(bad(next, 64).size() == 1);
    CHECK_THAT(bad(next, 64)[0].message, ContainsSubstring("a multiple of 4096"));
    const sg::Memory memory(graph, plan, nullptr, sg::spill_files(std::filesystem::temp_directory_path().string()));
    CHECK(reinterpret_cast<std::uintptr_t>(memory.data(home)) % block == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(memory.data(next)) % block == 0);
  }
}
