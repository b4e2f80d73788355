#include "graphs/predict/offload_report.hpp"

#include <catch2/catch_test_macros.hpp>

#include "ops/offload_copy.hpp"

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

TEST_CASE("a predicted step is bound by what is busy longest", "[graphs][predict][offload]") {
  const Offloading made;
  const sg::PredictedStep step = sg::predicted_step(made.graph, {.nodes = made.times, .makespan_s = 5});
  CHECK(step.seconds == 5);
  CHECK(step.bound == "compute");
  CHECK(step.bound_s == 3);
  sg::Machine slow_link = sg::device_machine({.ranks = 2, .link_bytes_per_s = 1e3, .disk_bytes_per_s = 1e6});
  const sg::PredictedStep bound_by_link =
      sg::predicted_step(made.graph, sg::plan_memory(made.graph, {.machine = &slow_link}), slow_link);
  CHECK(bound_by_link.seconds > 4);
  CHECK((bound_by_link.bound == "h2d" || bound_by_link.bound == "compute"));  // copies without `async` are on that lane
  sg::Machine slow_disk = sg::device_machine({.ranks = 2, .disk_bytes_per_s = 1e3});
  CHECK(sg::predicted_step(made.graph, sg::plan_memory(made.graph, {.machine = &slow_disk}), slow_disk).bound ==
        "disk");
}
