#include "graphs/predict/offload_report.hpp"

#include <array>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/look/analysis.hpp"
#include "engine/run/streams.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/step/training_step.hpp"
#include "ops/transfers/offload_copy.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::LaneKind;
using sg::Space;

namespace {

// Two ranks. Each fills a slot from its home, computes, and writes it back; rank 1 also uses a disk.
struct Offloading {
  sg::Graph graph{2};
  std::vector<sg::NodeTime> times;

  sg::Buffer buffer(const char* name, int rank, std::int64_t bytes, Space space) {
    return graph.buffer({.name       = name,
                         .rank       = sg::Rank{rank},
                         .size_bytes = bytes,
                         .space      = space,
                         .lifetime   = space == Space::device ? sg::Lifetime::step : sg::Lifetime::persistent});
  }
  Offloading() {
    for (int rank = 0; rank < 2; ++rank) {
      const std::int64_t bytes = rank == 0 ? 1000 : 4096;
      const sg::Buffer home    = buffer("home", rank, bytes, Space::pinned),
                       slot    = buffer("slot", rank, bytes, Space::device);
      if (rank == 1) {
        const sg::Buffer file = buffer("file", rank, 3 * bytes, Space::disk);
        sg::disk_copy(graph, {.name = "read", .to = home, .from = file.range(4096, 4096)});
        times.push_back({0, 1});
      }
      sg::offload_copy(graph, {.name = "up", .to = slot, .from = home});
      times.push_back({1, 3});
      graph.add({.name = "compute", .lane = graph.lane(sg::Rank{rank}, LaneKind::compute), .accumulates = {slot}},
                [] {});
      times.push_back({2, 4});
      // On the compute lane, as without offload.async.
      sg::offload_copy(graph, {.name = "down", .lane = LaneKind::compute, .to = home, .from = slot});
      times.push_back({4, 5});
    }
  }
};

}  // namespace

TEST_CASE("bytes between spaces are counted by direction, on any lane", "[graphs][predict][offload]") {
  const Offloading step;
  CHECK(sg::transfer_bytes(step.graph) ==
        sg::TransferBytes{.h2d = 5096, .d2h = 5096, .disk_read = 4096, .disk_write = 0});
  CHECK(sg::transfer_bytes(sg::slice(step.graph, sg::Rank{0})) == sg::TransferBytes{.h2d = 1000, .d2h = 1000});
  CHECK(sg::transfer_bytes(sg::Graph(1)) == sg::TransferBytes{});
}

TEST_CASE("offload figures are sums over ranks", "[graphs][predict][offload]") {
  const Offloading made;
  sg::StepGraph step{.graph = made.graph, .layout = sg::Layout({.dp = 2}), .model = {}, .batch = {}};
  const sg::Buffer home{0};
  step.homes.push_back(
      {.home = home, .buffer = home, .type = sg::DType::f32, .elements = 500, .compression = sg::Compression::bf16});
  step.offload.units.push_back({.unit = "layer0", .bytes = 2000});
  const sg::MemoryPlan plan      = sg::plan_memory(step.graph);
  const sg::OffloadFigures found = sg::offload_figures(step, plan, {.nodes = made.times, .makespan_s = 5});
  CHECK(found.moved == sg::transfer_bytes(step.graph));
  CHECK(found.transfer_s == 3 + 4);
  CHECK(found.exposed_s == 2 + 3);
  CHECK(found.host_bytes ==
        plan.arena(sg::Rank{0}, Space::pinned).size_bytes + plan.arena(sg::Rank{1}, Space::pinned).size_bytes);
  CHECK(found.host_bytes >= 5096);
  CHECK(found.disk_bytes == plan.arena(sg::Rank{1}, Space::disk).size_bytes);
  CHECK(found.disk_bytes >= 3 * 4096);
  CHECK(found.lossy);
  CHECK(found.raw_bytes == 2000);
  CHECK(found.ratio() == 0.5);
  CHECK(found.units.size() == 1);
}

TEST_CASE("a predicted step is bound by the busiest lane, or by the busiest lanes of two phases",
          "[graphs][predict][offload]") {
  const Offloading made;
  // Rank 1: read, up, compute, down. Rank 0 is faster.
  const auto bound = [&](double read, double up, double compute, double down) {
    sg::Timeline times{.nodes = {{0, 0.5}, {0.5, 0.75}, {0.75, 1}}};
    for (const double seconds : {read, up, compute, down}) {
      times.nodes.push_back({times.makespan_s, times.makespan_s + seconds});
      times.makespan_s += seconds;
    }
    const sg::PredictedStep step = sg::predicted_step(made.graph, times);
    CHECK(step.seconds == times.makespan_s);
    CHECK(step.bound_s <= step.seconds);
    return std::pair(step.bound, step.bound_s);
  };
  using Bound = std::pair<std::string, double>;
  CHECK(bound(0, 0, 4, 2) == Bound("compute", 6));
  CHECK(bound(0, 8, 4, 2) == Bound("h2d, then compute", 14));
  CHECK(bound(8, 2, 4, 2) == Bound("disk, then h2d, then compute", 16));  // `up` divides the phases
  // Of 128 s, `up` takes less than 5%: the bound counts it and does not name it.
  CHECK(bound(0, 6, 100, 22) == Bound("compute", 128));
  CHECK(bound(0, 8, 100, 20) == Bound("h2d, then compute", 128));

  sg::Machine slow_link = sg::device_machine({.ranks = 2, .link_bytes_per_s = 1e3, .disk_bytes_per_s = 1e6});
  const sg::PredictedStep bound_by_link =
      sg::predicted_step(made.graph, sg::plan_memory(made.graph, {.machine = &slow_link}), slow_link);
  CHECK(bound_by_link.seconds > 4);
  CHECK(bound_by_link.bound == "h2d, then compute");  // copies without `async` are on that lane
  sg::Machine slow_disk = sg::device_machine({.ranks = 2, .disk_bytes_per_s = 1e3});
  CHECK(sg::predicted_step(made.graph, sg::plan_memory(made.graph, {.machine = &slow_disk}), slow_disk).bound ==
        "disk");
}

TEST_CASE("the bound of a step is never above its simulated time, and above the busiest lane where phases follow",
          "[graphs][predict][offload]") {
  struct Case {
    const char* name;
    sg::Plan plan;
    bool phases = false;
  };
  const sg::OffloadPlan optimizer{.optimizer = true};
  const Case step = GENERATE_COPY(
      Case{"no offload", {}}, Case{"optimizer", {.offload = optimizer}, true},
      Case{"gradients too", {.offload = {.grads = true, .optimizer = true}}, true},
      Case{"all", {.offload = {.params = true, .grads = true, .optimizer = true, .activations = true}}, true},
      Case{"update at the end", {.offload = {.optimizer = true, .overlap = false}}, true},
      Case{"no clipping", {.offload = optimizer, .optimizer = {.clip = 0}}, true},
      Case{"zero1", {.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::zero1}, .offload = optimizer}},
      Case{"tp 2", {.layout = {.tp = 2}, .offload = optimizer}},
      Case{"pp 2", {.layout = {.pp = 2}, .offload = optimizer}});
  CAPTURE(step.name);
  const sg::StepGraph made =
      sg::training_step(sg::testing::small_gpt2(), step.plan, {.global = 4, .micro = 1, .seq = 8});
  const sg::MemoryPlan plan = sg::plan_memory(made.graph);
  const sg::Edges edges     = sg::stream_edges(made.graph, plan);
  // Copies take about as long as compute.
  sg::Machine machine = sg::device_machine({.ranks            = made.layout.num_ranks(),
                                            .flops_per_s      = 1e11,
                                            .link_bytes_per_s = 2e9,
                                            .host_bytes_per_s = 4e9,
                                            .launch_s         = 1e-7});
  machine.beside(LaneKind::h2d, std::array{LaneKind::host}, 1.5);
  machine.beside(LaneKind::host, std::array{LaneKind::h2d, LaneKind::d2h}, 1.4);
  const sg::Timeline times      = sg::simulate({made.graph, edges}, machine);
  const sg::PredictedStep found = sg::predicted_step(made.graph, times);
  double busiest                = 0;
  for (const sg::LaneBusy& lane : sg::busy_lanes(made.graph, times)) busiest = std::max(busiest, lane.busy_s);
  CHECK(found.bound_s <= times.makespan_s * (1 + 1e-9));
  CHECK(found.bound_s >= busiest);
  if (step.phases) {
    CHECK(found.bound_s > 1.1 * busiest);
    CHECK_THAT(found.bound, Catch::Matchers::ContainsSubstring(", then "));
  }
  const sg::PredictedStep planned = sg::predicted_step(made.graph, plan, machine);
  CHECK(planned.seconds == times.makespan_s);
  CHECK(planned.bound_s == found.bound_s);
}
