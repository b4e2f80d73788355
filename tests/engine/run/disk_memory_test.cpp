// Buffers on disk: their memory, and graphs that copy from the device over pinned memory to the disk and back.
#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cstdint>
#include <numeric>
#include <sstream>
#include <thread>

#include "backends/loopback/world.hpp"
#include "backends/storage/spill_file.hpp"
#include "engine/base/error.hpp"
#include "engine/draw/dot.hpp"
#include "engine/look/trace.hpp"
#include "engine/run/context.hpp"
#include "engine/run/executor.hpp"
#include "engine/run/memory.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/worlds/eager_world.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::EagerWorld;
using sg::testing::TempFolder;

namespace {

constexpr std::int64_t count = 3000, bytes = count * 4;

sg::Buffer floats(sg::Graph& graph, const char* name, sg::Space space, sg::Lifetime lifetime) {
  return graph.buffer(
      {.name = name, .size_bytes = bytes, .type = sg::DType::f32, .space = space, .lifetime = lifetime});
}

void add_copy(sg::Graph& graph, const char* name, sg::LaneKind lane, sg::Buffer from, sg::Buffer to) {
  graph.add({.name   = name,
             .lane   = graph.lane(sg::Rank{0}, lane),
             .reads  = from,
             .writes = to,
             .kind   = sg::NodeKind::copy,
             .device = true},
            [](const sg::Context& c) { std::ranges::copy(c.read<float>(), c.write<float>().begin()); });
}

void add_disk_write(sg::Graph& graph, sg::Buffer from, sg::Buffer to) {
  graph.add({.name   = "to disk",
             .lane   = graph.lane(sg::Rank{0}, sg::LaneKind::disk),
             .reads  = from,
             .writes = to,
             .kind   = sg::NodeKind::host},
            [](const sg::Context& c) {
              const sg::StoredBytes to_disk = c.stored(sg::AccessMode::write);
              to_disk.storage->write(to_disk.offset, std::as_bytes(c.read<float>()));
            });
}

void add_disk_read(sg::Graph& graph, sg::Buffer from, sg::Buffer to) {
  graph.add({.name   = "from disk",
             .lane   = graph.lane(sg::Rank{0}, sg::LaneKind::disk),
             .reads  = from,
             .writes = to,
             .kind   = sg::NodeKind::host},
            [](const sg::Context& c) {
              const sg::StoredBytes on_disk = c.stored(sg::AccessMode::read);
              on_disk.storage->read(on_disk.offset, std::as_writable_bytes(c.write<float>()));
            });
}

// start += 1 in each run, by the way of the disk: device, pinned, disk, pinned, a host node, device.
struct RoundTrip {
  sg::Graph graph;
  sg::Buffer start   = floats(graph, "start", sg::Space::device, sg::Lifetime::persistent);
  sg::Buffer out     = floats(graph, "out", sg::Space::pinned, sg::Lifetime::step);
  sg::Buffer home    = floats(graph, "home", sg::Space::disk, sg::Lifetime::persistent);
  sg::Buffer scratch = floats(graph, "scratch", sg::Space::disk, sg::Lifetime::step);
  sg::Buffer again   = floats(graph, "again", sg::Space::pinned, sg::Lifetime::step);
  sg::Buffer in      = floats(graph, "in", sg::Space::pinned, sg::Lifetime::step);
  sg::Buffer more    = floats(graph, "more", sg::Space::pinned, sg::Lifetime::step);

  RoundTrip() {
    add_copy(graph, "d2h", sg::LaneKind::d2h, start, out);
    add_disk_write(graph, out, scratch);
    add_disk_read(graph, scratch, again);
    add_disk_write(graph, again, home);
    add_disk_read(graph, home, in);
    graph.add({.name     = "add one",
               .lane     = graph.lane(sg::Rank{0}, sg::LaneKind::host),
               .reads    = in,
               .writes   = more,
               .kind     = sg::NodeKind::host,
               .parallel = true},
              [](const sg::Context& c) {
                const auto from = c.read<float>();
                const auto to   = c.write<float>();
                c.parallel_for(30, [&](std::int64_t tile) {
                  for (std::int64_t i = tile * 100; i < (tile + 1) * 100; ++i)
                    to[static_cast<std::size_t>(i)] = from[static_cast<std::size_t>(i)] + 1;
                });
              });
    add_copy(graph, "h2d", sg::LaneKind::h2d, more, start);
  }
};

std::vector<float> counted(float first) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

std::vector<float> read(const sg::Memory& memory, sg::Buffer buffer) {
  std::vector<float> values(count);
  memory.read(buffer, std::span(values));
  return values;
}

void goes_around(sg::World& world) {
  const TempFolder folder;
  const RoundTrip trip;
  const sg::RunnableGraph runnable(trip.graph, world, {});
  sg::verify(runnable);
  const sg::Program program(runnable, world, nullptr, sg::spill_files(folder.path()));
  const bool on_device = world.device() != nullptr;
  CHECK(program.num_waiting_lanes() == (on_device ? 2 : 1));
  sg::Executor executor({.threads = 2, .waiting_lanes = static_cast<int>(program.num_waiting_lanes())});
  program.memory().write(trip.start, std::span<const float>(counted(0)));
  for (int run = 0; run < 5; ++run) executor.run(program);
  CHECK(read(program.memory(), trip.start) == counted(5));
  CHECK(read(program.memory(), trip.home) == counted(4));

  sg::Recorder recorder;
  executor.run(program, &recorder);
  CHECK(read(program.memory(), trip.start) == counted(6));
  std::ostringstream trace, dot;
  sg::write_trace(runnable, recorder.timeline(), trace);
  CHECK_THAT(trace.str(), ContainsSubstring("to disk") && ContainsSubstring("disk"));
  sg::write_dot(runnable, dot);
  CHECK_THAT(dot.str(), ContainsSubstring("cluster_rank0_disk") && ContainsSubstring("add one"));
  CHECK(sg::simulate(runnable, sg::Machine(1)).makespan_s >= 0);
}

}  // namespace

TEST_CASE("a graph copies device to pinned to disk to pinned to device, on loopback and on a device",
          "[engine][memory][disk]") {
  SECTION("loopback") {
    sg::LoopbackWorld world(1);
    goes_around(world);
  }
  SECTION("a device") {
    EagerWorld world(1);
    goes_around(world);
  }
}

TEST_CASE("a node on the disk lane waits while others compute, on one thread", "[engine][disk]") {
  sg::Graph graph;
  const sg::Buffer a = graph.buffer({.name = "a", .size_bytes = 8}), b = graph.buffer({.name = "b", .size_bytes = 8});
  std::atomic<bool> computed{false}, seen{false};
  graph.add({.name   = "slow disk",
             .lane   = graph.lane(sg::Rank{0}, sg::LaneKind::disk),
             .writes = a,
             .kind   = sg::NodeKind::host},
            [&](const sg::Context& c) {
              while (!computed && !c.stopping()) std::this_thread::yield();
              seen = computed.load();
            });
  graph.add({.name = "compute", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .writes = b},
            [&] { computed = true; });
  sg::LoopbackWorld world(1);
  const sg::Program program(graph, world);
  REQUIRE(program.num_waiting_lanes() == 1);
  sg::Executor executor({.threads = 1, .waiting_lanes = 1, .step_timeout = std::chrono::seconds(60)});
  executor.run(program);
  CHECK(seen);
}

TEST_CASE("a host node uses all threads of the pool, also on the thread of a device's lane", "[engine][disk]") {
  const bool on_device = GENERATE(false, true);
  CAPTURE(on_device);
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8, .space = sg::Space::pinned});
  std::atomic<int> inside{0}, most{0};
  graph.add({.name     = "update",
             .lane     = graph.lane(sg::Rank{0}, sg::LaneKind::host),
             .writes   = x,
             .kind     = sg::NodeKind::host,
             .parallel = true},
            [&](const sg::Context& c) {
              c.parallel_for(2, [&](std::int64_t) {  // each tile waits for the other: two threads must have them
                ++inside;
                while (inside < 2 && !c.stopping()) std::this_thread::yield();
                most = std::max(most.load(), inside.load());
              });
            });
  sg::LoopbackWorld loopback(1);
  EagerWorld device(1);
  sg::World& world = on_device ? static_cast<sg::World&>(device) : loopback;
  const sg::Program program(graph, world);
  sg::Executor executor({.threads       = 2,
                         .waiting_lanes = static_cast<int>(program.num_waiting_lanes()),
                         .step_timeout  = std::chrono::seconds(60)});
  executor.run(program);
  CHECK(most == 2);
}

TEST_CASE("memory on disk is read and written, but has no addresses", "[engine][memory][disk]") {
  const TempFolder folder;
  const RoundTrip trip;
  const auto plan            = GENERATE(false, true) ? std::optional(sg::plan_memory(trip.graph)) : std::nullopt;
  const sg::MakeStorage make = sg::spill_files(folder.path());
  sg::Memory memory = plan ? sg::Memory(trip.graph, *plan, nullptr, make) : sg::Memory(trip.graph, nullptr, make);
  CHECK(read(memory, trip.home) == std::vector<float>(count, 0));
  memory.write(trip.home, std::span<const float>(counted(1)));
  CHECK(read(memory, trip.home) == counted(1));
  memory.write(trip.home, std::span<const float>(counted(1)).subspan(0, 3), 7);
  CHECK(memory.first<float>(trip.home) == 1);
  std::vector<float> few(5);
  memory.read(trip.home, std::span(few), 6);
  CHECK(few == std::vector<float>{7, 1, 2, 3, 11});
  CHECK(std::ranges::equal(memory.span<float>(trip.start), std::vector<float>(count, 0)));

  const sg::StoredBytes home = memory.stored(trip.home);
  REQUIRE(home.storage != nullptr);
  CHECK(home.offset % sg::Storage::block_bytes == 0);
  CHECK(home.size_bytes == bytes);
  CHECK(home.storage->size_bytes() == 2 * 3 * sg::Storage::block_bytes);
  CHECK(memory.stored(trip.out).storage == nullptr);

  CHECK_THROWS_MATCHES(
      memory.bytes(trip.home), sg::Error,
      MessageMatches(ContainsSubstring("buffer 'home' of rank 0 is on disk (read() and write() copy)")));
  CHECK_THROWS_MATCHES(memory.arena(sg::Rank{0}, sg::Space::disk), sg::Error,
                       MessageMatches(ContainsSubstring("the arena of rank 0 on disk has no addresses")));
  memory.poison();
  CHECK(memory.used_bytes(sg::Rank{0}, sg::Space::disk) == 3 * sg::Storage::block_bytes);  // the persistent ones
  memory.write(trip.scratch, std::span<const float>(counted(1)));
  CHECK(memory.used_bytes(sg::Rank{0}, sg::Space::disk) == 3 * sg::Storage::block_bytes + bytes);
  CHECK(memory.first<float>(trip.home) == 1);
}

TEST_CASE("buffers on disk without a maker of storage, or in the wrong nodes, are refused",
          "[engine][memory][disk][refuses]") {
  const TempFolder folder;
  const sg::MakeStorage make = sg::spill_files(folder.path());
  sg::LoopbackWorld world(1);
  const RoundTrip trip;
  CHECK_THROWS_MATCHES(
      sg::Memory(trip.graph), sg::Error,
      MessageMatches(ContainsSubstring("memory: rank 0 has 24576 bytes of buffers on disk, and nothing makes "
                                       "their storage (pass a MakeStorage, as RunOptions::storage")));
  CHECK_THROWS_AS(sg::Program(trip.graph, world), sg::Error);

  sg::Graph graph;
  const sg::Buffer disk = floats(graph, "there", sg::Space::disk, sg::Lifetime::persistent),
                   here = floats(graph, "here", sg::Space::pinned, sg::Lifetime::persistent);
  const auto refuses    = [&](const auto& body, const char* why) {
    sg::Graph one = graph;
    one.add({.name = "use", .reads = {disk, here}, .kind = sg::NodeKind::host}, body);
    sg::Executor executor({.threads = 1});
    CHECK_THROWS_MATCHES(executor.run(sg::Program(one, world, nullptr, make)), sg::Error,
                            MessageMatches(ContainsSubstring(why)));
  };
  refuses([](const sg::Context& c) { (void)c.read<float>(0); },
          "read(0): buffer 'there' is on disk, where it has no address (use stored, or copy it to a buffer in pinned");
  refuses([](const sg::Context& c) { (void)c.stored(sg::AccessMode::read, 1); },
          "stored(read, 1): buffer 'here' is in pinned memory (use read)");
  refuses([](const sg::Context& c) { (void)c.stored(sg::AccessMode::write, 0); },
          "write(0): the node declares 0 such accesses");

  EagerWorld device(1);
  sg::Graph on_device = graph;
  on_device.add(
      {.name = "kernel", .lane = on_device.lane(sg::Rank{0}, sg::LaneKind::compute), .reads = disk, .device = true},
      [](const sg::Context&) {});
  CHECK_THROWS_MATCHES(
      sg::Program(on_device, device, nullptr, make), sg::Error,
      MessageMatches(ContainsSubstring("its buffer 'there' is on disk, which a device cannot use (make it a "
                                       "host node on lane disk)")));
  sg::Graph sending     = graph;
  const sg::Group group = sending.group({.name = "all", .ranks = {sg::Rank{0}}});
  sending.add({.name        = "sum",
               .lane        = sending.lane(sg::Rank{0}, sg::LaneKind::reduce),
               .accumulates = disk,
               .part        = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce, .type = sg::DType::f32},
               .kind        = sg::NodeKind::communicate});
  CHECK_THROWS_MATCHES(sg::Program(sending, world, nullptr, make), sg::Error,
                       MessageMatches(ContainsSubstring("part 'sum' of rank 0 uses buffer 'there', which is on disk")));
}

TEST_CASE("a second graph reads and writes storage that it is lent", "[engine][memory][disk]") {
  const TempFolder folder;
  int made                   = 0;
  const sg::MakeStorage make = [&](sg::Rank rank, std::int64_t size) {
    ++made;
    return sg::spill_files(folder.path())(rank, size);
  };
  const RoundTrip owner;
  const sg::Memory memory(owner.graph, sg::plan_memory(owner.graph), nullptr, make);
  memory.write(owner.home, std::span<const float>(counted(3)));
  sg::Graph graph;
  const sg::Buffer first = floats(graph, "first", sg::Space::disk, sg::Lifetime::persistent),
                   lent  = floats(graph, "lent", sg::Space::disk, sg::Lifetime::persistent),
                   last  = floats(graph, "last", sg::Space::disk, sg::Lifetime::persistent),
                   here  = floats(graph, "here", sg::Space::pinned, sg::Lifetime::persistent);
  add_disk_read(graph, lent, here);
  sg::LoopbackWorld world(1);
  const sg::RunnableGraph runnable(graph, world, {});
  const std::vector<sg::Loan> loans{memory.loan(owner.home, lent)};
  const auto second = std::make_shared<sg::Memory>(graph, *runnable.memory(), loans, nullptr, make);
  CHECK(made == 2);
  CHECK(second->stored(first).storage->size_bytes() == 2 * 3 * sg::Storage::block_bytes);  // without the lent bytes
  second->write(first, std::span<const float>(counted(100)));
  second->write(last, std::span<const float>(counted(200)));
  sg::Executor executor({.threads = 1, .waiting_lanes = 1});
  executor.run(sg::Program(runnable, world, second));
  CHECK(read(*second, here) == counted(3));
  second->write(lent, std::span<const float>(counted(4)));
  CHECK(read(memory, owner.home) == counted(4));
  CHECK(read(*second, first) == counted(100));
  CHECK(read(*second, last) == counted(200));

  // Nothing of its own on disk: no storage is made.
  const std::vector<sg::Loan> all{memory.loan(owner.home, lent), second->loan(first, first), second->loan(last, last)};
  const sg::Memory third(graph, *runnable.memory(), all);
  CHECK(made == 2);
  CHECK(read(third, last) == counted(200));
  CHECK_THROWS_MATCHES(
      sg::Memory(graph, *runnable.memory(), std::vector{memory.loan(owner.home, lent), memory.loan(owner.home, first)},
                 nullptr, make),
      sg::Error,
      MessageMatches(ContainsSubstring("buffer 'first' of rank 0 is lent bytes that are also lent to buffer 'lent'")));
  CHECK_THROWS_MATCHES(
      sg::Memory(graph, *runnable.memory(), std::vector{memory.loan(owner.start, lent)}, nullptr, make), sg::Error,
      MessageMatches(ContainsSubstring("is in disk memory, but is lent bytes in memory")));
}
