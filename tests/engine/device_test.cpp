// Programs on a device, by one that does at once what is enqueued: what the engine asks of a device, and in which
// order.
#include "engine/device.hpp"

#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "backends/loopback/world.hpp"
#include "engine/context.hpp"
#include "engine/error.hpp"
#include "engine/executor.hpp"
#include "engine/streams.hpp"
#include "ops/collectives.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

struct EagerMemory final : sg::DeviceMemory {
  [[nodiscard]] std::byte* allocate(sg::Rank, sg::Space, std::size_t size) override {
    ++held;
    return static_cast<std::byte*>(std::calloc(size, 1));
  }
  void release(sg::Rank, sg::Space, std::byte* bytes) noexcept override {
    --held;
    std::free(bytes);
  }
  [[nodiscard]] bool host_sees(sg::Space space) const noexcept override { return space == sg::Space::pinned; }
  void read(const std::byte* from, std::span<std::byte> to) override { std::memcpy(to.data(), from, to.size()); }
  void write(std::byte* to, std::span<const std::byte> from) override { std::memcpy(to, from.data(), from.size()); }
  int held = 0;
};

struct EagerDevice final : sg::Device {
  struct Program final : sg::DeviceProgram {
    Program(EagerDevice& device, const sg::Graph& of, sg::StreamPlan streams)
        : owner(device), graph(of), plan(std::move(streams)) {
      owner.last_plan = plan;
    }
    [[nodiscard]] bool replay() override { return false; }
    void begin(bool) override { owner.order.clear(); }
    [[nodiscard]] const sg::DeviceQueue* before(sg::Node node) override {
      const std::lock_guard lock(owner.mutex);
      owner.order.push_back(node.id);
      return plan.stream[node.id] == sg::StreamPlan::none ? nullptr : &queue;
    }
    void after(sg::Node) override {
      const std::lock_guard lock(owner.mutex);
      ++owner.num_after;
    }
    void end(bool good) override { owner.good = good; }
    [[nodiscard]] bool done() override { return true; }
    [[nodiscard]] std::vector<sg::NodeTime> times() override {
      return std::vector<sg::NodeTime>(graph.num_nodes(), sg::NodeTime{.begin_s = 1, .end_s = 2});
    }
    EagerDevice& owner;
    sg::Graph graph;
    sg::StreamPlan plan;
    sg::DeviceQueue queue;
  };
  [[nodiscard]] sg::DeviceMemory& memory() override { return bytes; }
  [[nodiscard]] std::unique_ptr<sg::DeviceProgram> lower(const sg::Graph& graph, sg::StreamPlan plan) override {
    return std::make_unique<Program>(*this, graph, std::move(plan));
  }
  EagerMemory bytes;
  std::mutex mutex;  // guards the next two
  sg::StreamPlan last_plan;
  std::vector<std::uint32_t> order;  // of the last run, all parts of a communication
  int num_after = 0;
  bool good     = false;
};

class EagerWorld final : public sg::World {
 public:
  explicit EagerWorld(int num_ranks) : loopback_(num_ranks) {}
  [[nodiscard]] int num_ranks() const override { return loopback_.num_ranks(); }
  [[nodiscard]] bool is_local(sg::Rank) const override { return true; }
  [[nodiscard]] bool waits(sg::LaneKind) const override { return false; }
  [[nodiscard]] sg::IssueOrder issue_order() const override { return sg::IssueOrder::any; }
  [[nodiscard]] sg::Device* device() override { return &eager; }
  void communicate(const sg::Context& context, const sg::Exchange& exchange) override {
    for (const sg::LocalPart& part : exchange.parts) parts_with_queue += part.queue != nullptr;
    loopback_.communicate(context, exchange);
  }
  void abort(std::string_view) noexcept override {}

  EagerDevice eager;
  int parts_with_queue = 0;

 private:
  sg::LoopbackWorld loopback_;
};

// Each rank adds its number to x; all ranks sum up what they have.
sg::Graph summing(int ranks, std::vector<sg::Buffer>& x) {
  sg::Graph graph(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    x.push_back(graph.buffer({.name       = "x",
                              .rank       = sg::Rank{rank},
                              .size_bytes = 8,
                              .type       = sg::DType::f64,
                              .lifetime   = sg::Lifetime::persistent}));
    graph.add({.name        = "add",
               .lane        = graph.lane(sg::Rank{rank}, sg::LaneKind::compute),
               .accumulates = x.back(),
               .device      = true},
              [rank](const sg::Context& context) {
                if (context.device() == nullptr) throw std::runtime_error("is not on a device");
                context.accumulate<double>()[0] += rank + 1;
              });
  }
  std::vector<sg::Rank> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(sg::Rank{rank});
  const sg::Group group = graph.group({.name = "all", .ranks = all});
  for (int rank = 0; rank < ranks; ++rank) {
    graph.add({.name        = "sum",
               .lane        = graph.lane(sg::Rank{rank}, sg::LaneKind::reduce),
               .accumulates = x[static_cast<std::size_t>(rank)],
               .part        = sg::PartSpec{.group = group, .op = sg::PartOp::all_reduce, .type = sg::DType::f64},
               .kind        = sg::NodeKind::communicate});
  }
  return graph;
}

}  // namespace

TEST_CASE("a program on a device issues every node once, in an order that edges allow", "[engine][device]") {
  EagerWorld world(3);
  std::vector<sg::Buffer> x;
  const sg::Graph graph = summing(3, x);
  sg::Executor executor({.threads = 2});
  {
    const sg::MemoryPlan plan = sg::plan_memory(graph);
    const sg::Program program(graph, world, plan);
    executor.run(program);
    for (const sg::Buffer each : x) CHECK(program.memory().first<double>(each) == 6);
    CHECK(world.eager.order.size() == 6);
    CHECK(world.eager.num_after == 6);
    CHECK(program.issue_s() > 0);
    CHECK(world.eager.good);
    CHECK(world.parts_with_queue == 3);
    const auto place = [&](std::uint32_t node) {
      return std::find(world.eager.order.begin(), world.eager.order.end(), node) - world.eager.order.begin();
    };
    for (std::uint32_t rank = 0; rank < 3; ++rank) CHECK(place(rank) < place(3 + rank));
    executor.run(program);
    CHECK(program.memory().first<double>(x[0]) == 24);
    CHECK_THROWS_MATCHES(program.memory().span<double>(x[0]), sg::Error,
                         MessageMatches(ContainsSubstring("is on a device (read() and write() copy)")));
    sg::Recorder recorder;
    executor.run(program, &recorder);
    CHECK(recorder.timeline().makespan_s == 2);
  }
  CHECK(world.eager.bytes.held == 0);  // an executor keeps nobody's memory
}

TEST_CASE("a program's streams are those that can be planned and proved without a device", "[engine][device]") {
  EagerWorld world(3);
  std::vector<sg::Buffer> x;
  sg::Graph graph = summing(3, x);
  for (int i = 0; i < 3; ++i) graph.add({.name = "later", .lane = graph.lane(sg::Rank{1}, sg::LaneKind::h2d)});
  const sg::MemoryPlan plan = sg::plan_memory(graph);
  const sg::Program program(graph, world, plan);
  const sg::StreamPlan planned = sg::plan_streams(graph, plan, sg::LoopbackWorld(3)), &had = world.eager.last_plan;
  CHECK_FALSE(std::is_sorted(planned.issue_order.begin(), planned.issue_order.end()));  // along the plan
  CHECK(had.issue_order == planned.issue_order);
  CHECK(had.stream == planned.stream);
  CHECK(had.waits == planned.waits);
  CHECK(had.loop_waits == planned.loop_waits);
  CHECK(planned.num_streams() == 7);
}

TEST_CASE("what a device cannot run is refused or named", "[engine][device][refuses]") {
  EagerWorld world(1);
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name = "x", .size_bytes = 8, .lifetime = sg::Lifetime::persistent});
  SECTION("a body that does not know devices") {
    graph.add({.name = "mine", .writes = x, .op = "my_op"}, [] {});
    CHECK_THROWS_MATCHES(sg::Program(graph, world), sg::Error,
                         MessageMatches(ContainsSubstring("op 'my_op', has no kernel for a device")));
  }
  SECTION("a body that fails") {
    graph.add({.name = "mine", .writes = x, .device = true}, [] { throw std::runtime_error("out of ideas"); });
    sg::Executor executor({.threads = 1});
    const sg::Program program(graph, world);
    CHECK_THROWS_MATCHES(executor.run(program), sg::Error, MessageMatches(ContainsSubstring("'mine': out of ideas")));
    CHECK_FALSE(world.eager.good);
  }
}

TEST_CASE("a host node on a device's program runs on the host, after what it follows", "[engine][device]") {
  EagerWorld world(1);
  sg::Graph graph;
  const sg::Buffer x = graph.buffer({.name       = "x",
                                     .size_bytes = 8,
                                     .type       = sg::DType::f64,
                                     .space      = sg::Space::pinned,
                                     .lifetime   = sg::Lifetime::persistent});
  graph.add({.name = "set", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::compute), .writes = x, .device = true},
            [](const sg::Context& context) { context.write<double>()[0] = 5; });
  double seen = 0;
  graph.add(
      {.name = "look", .lane = graph.lane(sg::Rank{0}, sg::LaneKind::host), .reads = x, .kind = sg::NodeKind::host},
      [&seen](const sg::Context& context) {
        if (context.device() == nullptr) seen = context.read<double>()[0];
      });
  sg::Executor executor({.threads = 1, .waiting_lanes = 1});
  const sg::Program program(graph, world);
  executor.run(program);
  CHECK(seen == 5);
  CHECK(program.memory().span<double>(x)[0] == 5);  // the host sees it
}

TEST_CASE("a host node waits on a thread of its own while a device's program is issued", "[engine][device][threads]") {
  EagerWorld world(1);
  sg::Graph graph;
  const sg::Lane compute = graph.lane(sg::Rank{0}, sg::LaneKind::compute),
                 host    = graph.lane(sg::Rank{0}, sg::LaneKind::host);
  const auto buffer      = [&](const char* name) {
    return graph.buffer({.name = name, .size_bytes = 8, .space = sg::Space::pinned});
  };
  const sg::Buffer x = buffer("x"), y = buffer("y"), z = buffer("z");
  std::atomic<int> on_device{0};
  int seen = 0, seen_after = 0, at_the_end = 0;
  bool fails = false;
  graph.add({.name = "make x", .lane = compute, .writes = x, .device = true}, [&] { ++on_device; });
  graph.add({.name = "look", .lane = host, .reads = x, .writes = y, .kind = sg::NodeKind::host},
            [&](const sg::Context& c) {
              while (on_device < 3 && !c.stopping()) std::this_thread::yield();  // what it does not follow goes on
              seen = on_device;
              if (fails) throw std::runtime_error("no disk");
            });
  graph.add({.name = "look again", .lane = host, .reads = y, .kind = sg::NodeKind::host},
            [&] { seen_after = on_device; });
  for (int i = 0; i < 2; ++i)
    graph.add({.name = "other", .lane = compute, .writes = z, .device = true}, [&] { ++on_device; });
  graph.add({.name = "use y", .lane = compute, .reads = y, .device = true}, [&] { at_the_end = ++on_device; });
  const sg::Program program(graph, world);
  CHECK(program.num_waiting_lanes() == 1);
  sg::Executor few({.threads = 1});
  CHECK_THROWS_MATCHES(few.run(program), sg::Error,
                       MessageMatches(ContainsSubstring("1 lanes that wait (rank 0 host)")));
  sg::Executor executor({.threads = 1, .waiting_lanes = 1, .step_timeout = std::chrono::seconds(20)});
  for (int run = 0; run < 3; ++run) {
    on_device = seen = seen_after = at_the_end = 0;
    executor.run(program);
    CHECK(seen == 3);
    CHECK(seen_after >= 3);
    CHECK(at_the_end == 4);  // after `look`
  }
  fails     = true;
  on_device = at_the_end = 0;
  CHECK_THROWS_MATCHES(executor.run(program), sg::Error,
                       MessageMatches(ContainsSubstring("rank 0 host 'look': no disk")));
  CHECK(at_the_end == 0);
  fails     = false;
  on_device = 0;
  executor.run(program);
  CHECK(at_the_end == 4);
}
