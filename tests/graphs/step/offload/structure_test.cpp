// The graphs of steps with offload: which nodes there are, and which of them may run at the same time.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/predict/offload_report.hpp"
#include "graphs/step/offload/homes.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

sg::Model model_of(int layers = 6) {
  return sg::gpt2({.layers = layers, .width = 32, .heads = 2, .context = 16, .vocab = 64});
}

sg::StepGraph step_of(const sg::OffloadPlan& offload,
                      const sg::BatchSpec& batch = {.global = 1, .micro = 1, .seq = 16}) {
  return sg::training_step(model_of(), {.offload = offload}, batch);
}

struct Layer {
  std::vector<sg::Node> compute, fills;
};

// The nodes of the forward pass by layer; fills by the layer of the weight in their names.
std::map<int, Layer> forward_layers(const sg::Graph& graph) {
  std::map<int, Layer> layers;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    const sg::Node node{i};
    const sg::Labels labels = graph.labels(node);
    if (labels.phase != "forward") continue;
    if (graph.op(node) == "h2d") {
      const std::string name(graph.name(node));
      const auto at = name.find(".h.");
      if (at != std::string::npos) layers[std::stoi(name.substr(at + 3))].fills.push_back(node);
    } else if (graph.kind(node) == sg::NodeKind::compute && labels.layer >= 0) {
      layers[labels.layer].compute.push_back(node);
    }
  }
  return layers;
}

std::multiset<std::string> node_names(const sg::Graph& graph) {
  std::multiset<std::string> names;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) names.insert(graph.describe(sg::Node{i}));
  return names;
}

std::int64_t persistent_bytes(const sg::StepGraph& step, sg::Space space, sg::MemoryRole role) {
  std::int64_t sum = 0;
  for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i) {
    const sg::BufferSpec& spec = step.graph.spec(sg::Buffer{i});
    const bool counts          = spec.space == space && spec.lifetime == sg::Lifetime::persistent && !spec.token;
    if (counts && step.role(sg::Buffer{i}) == role) sum += spec.size_bytes;
  }
  return sum;
}

}  // namespace

TEST_CASE("with two slots a layer's weights arrive while the layer before it computes", "[graphs][offload]") {
  const int slots          = GENERATE(1, 2, 3);
  const sg::StepGraph step = step_of({.params = true, .slots = slots});
  const auto layers        = forward_layers(step.graph);
  CAPTURE(slots);
  REQUIRE(layers.size() == 6);
  for (int layer = 2; layer < 6; ++layer) {
    REQUIRE_FALSE(layers.at(layer).fills.empty());
    for (const sg::Node fill : layers.at(layer).fills) {
      for (int before = 1; before < layer; ++before) {
        CAPTURE(layer, before, step.graph.name(fill));
        // The fill waits for the layer that had the slot, and for all layers before that one.
        CHECK(reaches(step.graph, layers.at(before).compute.front(), fill) == (before <= layer - slots));
      }
    }
  }
}

TEST_CASE("slots change buffers and edges, never the set of nodes", "[graphs][offload]") {
  const sg::BatchSpec batch{.global = 2, .micro = 1, .seq = 16};
  const auto of = [&](int slots) {
    return node_names(
        step_of({.params = true, .grads = true, .optimizer = true, .activations = true, .slots = slots}, batch).graph);
  };
  const auto two = of(2);
  CHECK(of(1) == two);
  CHECK(of(3) == two);
  CHECK(of(5) == two);
}

TEST_CASE("offloaded classes have no persistent bytes on the device", "[graphs][offload]") {
  const sg::StepGraph without = step_of({});
  // With overlap, gradients last until the next step.
  const sg::StepGraph step = step_of({.params = true, .optimizer = true, .overlap = false});
  using sg::MemoryRole;
  using sg::Space;
  for (const MemoryRole role : {MemoryRole::parameters, MemoryRole::optimizer}) {
    CHECK(persistent_bytes(step, Space::device, role) == 0);
    CHECK(persistent_bytes(step, Space::pinned, role) == persistent_bytes(without, Space::device, role));
  }
  // Slots replace what has moved. If one class stayed, the step would need its bytes in addition.
  const auto planned = [](const sg::StepGraph& of) { return sg::plan_memory(of.graph).arena(sg::Rank{0}).size_bytes; };
  const auto moved   = persistent_bytes(without, Space::device, MemoryRole::parameters) +
                     persistent_bytes(without, Space::device, MemoryRole::optimizer);
  std::int64_t slots = 0;
  for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i) {
    const sg::BufferSpec& spec = step.graph.spec(sg::Buffer{i});
    if (spec.space == Space::device && step.role(sg::Buffer{i}) == MemoryRole::slots)
      slots += sg::MemoryPlan::room_of(spec);
  }
  CHECK(slots > 0);
  CHECK(slots < moved / 2);
  CHECK(planned(step) <= planned(without) - moved + slots);
}

TEST_CASE("activations that are offloaded leave the device", "[graphs][offload]") {
  const auto planned = [](const sg::StepGraph& of) { return sg::plan_memory(of.graph).arena(sg::Rank{0}).size_bytes; };
  const sg::Model deep = sg::gpt2({.layers = 12, .width = 8, .heads = 2, .context = 64, .vocab = 16});
  const sg::BatchSpec batch{.global = 4, .micro = 4, .seq = 64};
  const auto of = [&](bool activations) {
    sg::Plan plan;
    if (activations) plan.offload = {.activations = true, .slots = 1};
    return sg::training_step(deep, plan, batch);
  };
  CHECK(planned(of(true)) < planned(of(false)) * 2 / 3);
}

TEST_CASE("a resident share of weights stays on the device", "[graphs][offload]") {
  const sg::StepGraph all  = step_of({.params = true});
  const std::int64_t bytes = persistent_bytes(all, sg::Space::pinned, sg::MemoryRole::parameters);
  const sg::StepGraph half = step_of({.params = true, .device_param_bytes = bytes / 2});
  const std::int64_t stays = persistent_bytes(half, sg::Space::device, sg::MemoryRole::parameters);
  CHECK(stays <= bytes / 2);
  CHECK(stays > bytes / 4);
  CHECK(sg::transfer_bytes(half.graph).h2d < sg::transfer_bytes(all.graph).h2d);
}

TEST_CASE("updates on the host copy gradients down and weights up, and nothing else", "[graphs][offload]") {
  const sg::StepGraph step      = step_of({.optimizer = true});
  const sg::StepGraph without   = step_of({});
  const std::int64_t weights    = persistent_bytes(without, sg::Space::device, sg::MemoryRole::parameters);
  const sg::TransferBytes moved = sg::transfer_bytes(step.graph);
  CHECK(moved.h2d == weights);
  // In fp32 the update reads the old weights too. A few scalars follow.
  CHECK(moved.d2h >= 2 * weights);
  CHECK(moved.d2h <= 2 * weights + 64);
  for (const sg::OffloadedUnit& unit : step.offload.units) CHECK(unit.update == sg::UpdateMode::host);
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    if (step.graph.op(sg::Node{i}) != "adamw") continue;
    CHECK(step.graph.lane(sg::Node{i}) == sg::Lane{sg::Rank{0}, sg::LaneKind::host});
    CHECK(step.graph.kind(sg::Node{i}) == sg::NodeKind::host);
    CHECK_FALSE(step.graph.device(sg::Node{i}));
  }
}

TEST_CASE("updates are divided between host and device by rates, and only by them", "[graphs][offload]") {
  const auto on_host = [](const sg::StepOptions& options) {
    const sg::StepGraph step =
        sg::training_step(model_of(), {.offload = {.optimizer = true}}, {.global = 1, .micro = 1, .seq = 16}, options);
    std::vector<bool> found;
    for (const sg::OffloadedUnit& unit : step.offload.units) found.push_back(unit.update == sg::UpdateMode::host);
    return found;
  };
  const std::vector<bool> all = on_host({});
  CHECK(std::ranges::count(all, false) == 0);
  CHECK(on_host({.workspaces = {.bodies = true, .part = {}}}) == all);
  const std::vector<bool> divided = on_host({.offload_rates = sg::usual_offload_rates});
  CHECK(std::ranges::count(divided, true) > 0);
  CHECK(std::ranges::count(divided, false) > 0);
}

TEST_CASE("gradients that are offloaded are not fetched again for the norm", "[graphs][offload]") {
  const sg::StepGraph step   = step_of({.grads = true, .optimizer = true});
  const std::int64_t weights = persistent_bytes(step_of({}), sg::Space::device, sg::MemoryRole::parameters);
  const std::int64_t tied = std::int64_t{64} * 32 * 4;  // the gradient of the head, which is added to the embedding's
  // One microbatch: gradients go down once, and only the two of the tied weight come up again. Old weights go down too.
  const sg::TransferBytes moved = sg::transfer_bytes(step.graph);
  CHECK(moved.h2d == weights + 2 * tied);
  CHECK(moved.d2h <= 2 * weights + 2 * tied + 64);
}

TEST_CASE("transfers that are not asynchronous run on the compute lane", "[graphs][offload]") {
  const sg::StepGraph step =
      step_of({.params = true, .grads = true, .optimizer = true, .activations = true, .async = false});
  int copies = 0;
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    const std::string_view op = step.graph.op(sg::Node{i});
    if (op != "h2d" && op != "d2h") continue;
    ++copies;
    CHECK(step.graph.lane(sg::Node{i}) == sg::Lane{sg::Rank{0}, sg::LaneKind::compute});
  }
  CHECK(copies > 0);
}

TEST_CASE("what does not fit the host lies on disk, and pinned memory stays within the budget", "[graphs][offload]") {
  const sg::testing::TempFolder folder;
  const std::int64_t host_bytes = GENERATE(std::int64_t{64} << 10, std::int64_t{512} << 10, std::int64_t{4} << 20);
  CAPTURE(host_bytes);
  const sg::StepGraph step  = step_of({.params      = true,
                                       .grads       = true,
                                       .optimizer   = true,
                                       .activations = true,
                                       .host_bytes  = host_bytes,
                                       .disk        = folder.path().string()});
  const sg::MemoryPlan plan = sg::plan_memory(step.graph);
  CHECK(plan.arena(sg::Rank{0}, sg::Space::pinned).size_bytes <= host_bytes);
  const bool uses_disk = plan.arena(sg::Rank{0}, sg::Space::disk).size_bytes > 0;
  CHECK(uses_disk == (host_bytes < (std::int64_t{4} << 20)));
  for (const sg::OffloadedUnit& unit : step.offload.units) {
    if (unit.space == sg::Space::disk) CHECK(unit.update != sg::UpdateMode::host);
  }
}

TEST_CASE("homes that share host memory count as the memory plan has them", "[graphs][offload]") {
  const int layers     = sg::testing::sanitized() ? 5 : 12;
  const sg::Model deep = sg::gpt2({.layers = layers, .width = 8, .heads = 2, .context = 64, .vocab = 16});
  const sg::BatchSpec batch{.global = 8, .micro = 1, .seq = 64};
  const sg::testing::TempFolder folder;
  const auto of = [&](std::int64_t host_bytes, bool disk) {
    sg::OffloadPlan offload{.activations = true, .host_bytes = host_bytes};
    if (disk) offload.disk = folder.path().string();
    return sg::training_step(deep, {.offload = offload}, batch);
  };
  const auto planned = [](const sg::StepGraph& step) {
    return sg::plan_memory(step.graph).arena(sg::Rank{0}, sg::Space::pinned).size_bytes;
  };
  const auto home_bytes = [](const sg::StepGraph& step) {  // in host memory
    std::int64_t sum = 0;
    for (const sg::HomeFormat& home : step.homes) {
      if (home.space == sg::Space::pinned) sum += stored_bytes(home);
    }
    return sum;
  };
  const sg::StepGraph all   = of(0, false);
  const std::int64_t needed = planned(all);
  REQUIRE(4 * needed < home_bytes(all));  // microbatches use the same memory one after another
  for (const bool disk : {false, true}) {
    const sg::StepGraph fits = of(needed, disk);
    CHECK(planned(fits) <= needed);
    CHECK(home_bytes(fits) == home_bytes(all));
  }
  CHECK_THROWS_MATCHES(of(needed / 2, false), sg::Error,
                       MessageMatches(ContainsSubstring(sg::str("needs at least ", needed, " (")) &&
                                      ContainsSubstring("(offload.disk=FOLDER needs ") &&
                                      ContainsSubstring(sg::str(", or offload.host_bytes=", needed, ")"))));
  // What does not fit is on disk, and the others share the budget.
  const sg::StepGraph half = of(needed / 2, true);
  CHECK(planned(half) <= needed / 2);
  CHECK(home_bytes(half) > needed);
  // The same for homes on disk.
  const auto on_disk = [](const sg::StepGraph& step) {
    return sg::plan_memory(step.graph).arena(sg::Rank{0}, sg::Space::disk).size_bytes;
  };
  const auto of_disk = [&](std::int64_t disk_bytes) {
    return sg::training_step(deep,
                             {.offload = {.activations = true,
                                          .host_bytes  = 64 << 10,
                                          .disk_bytes  = disk_bytes,
                                          .disk        = folder.path().string()}},
                             batch);
  };
  const sg::StepGraph unlimited = of_disk(0);
  const std::int64_t used       = on_disk(unlimited);
  std::int64_t sum              = 0;
  for (const sg::HomeFormat& home : unlimited.homes) sum += home.space == sg::Space::disk ? stored_bytes(home) : 0;
  REQUIRE(used < sum);
  CHECK(on_disk(of_disk(used)) == used);
  CHECK_THROWS_MATCHES(of_disk(used - 1), sg::Error,
                       MessageMatches(ContainsSubstring(sg::str("offload.disk_bytes: rank 0 needs ", used, " (")) &&
                                      ContainsSubstring(sg::str("offload.disk_bytes=", used))));
}

TEST_CASE("a budget without a disk is refused with what would be right", "[graphs][offload]") {
  CHECK_THROWS_MATCHES(step_of({.optimizer = true, .host_bytes = 64 << 10}), sg::Error,
                       MessageMatches(ContainsSubstring("offload.host_bytes: rank 0 needs") &&
                                      ContainsSubstring("the budget is 65536") && ContainsSubstring("offload.disk")));
  const sg::testing::TempFolder folder;
  CHECK_THROWS_MATCHES(
      step_of({.optimizer = true, .host_bytes = 64 << 10, .disk_bytes = 64 << 10, .disk = folder.path().string()}),
      sg::Error, MessageMatches(ContainsSubstring("offload.disk_bytes: rank 0 needs")));
}

TEST_CASE("a buffer can have one home only, and not on the device", "[graphs][offload]") {
  sg::Graph graph;
  const sg::Buffer weight = graph.buffer({.name = "w", .size_bytes = 64, .lifetime = sg::Lifetime::persistent});
  CHECK_THROWS_MATCHES(with_homes(graph, {.homes = {{.buffer = weight}, {.buffer = weight}}}), sg::Error,
                       MessageMatches(ContainsSubstring("has two homes")));
  CHECK_THROWS_MATCHES(with_homes(graph, {.homes = {{.buffer = weight, .space = sg::Space::device}}}), sg::Error,
                       MessageMatches(ContainsSubstring("a home on the device")));
  CHECK_THROWS_MATCHES(with_homes(graph, {.homes = {{.buffer = weight}}, .slots = 0}), sg::Error,
                       MessageMatches(ContainsSubstring("offload.slots: 0")));
}

TEST_CASE("a use copies only the bytes that it reads and writes", "[graphs][offload]") {
  sg::Graph graph;
  const sg::Lane lane     = graph.lane(sg::Rank{0}, sg::LaneKind::compute);
  const sg::Buffer weight = graph.buffer({.name = "w", .size_bytes = 1024, .lifetime = sg::Lifetime::persistent});
  const sg::Buffer sum    = graph.buffer({.name = "s", .size_bytes = 512});
  graph.add({.name = "read", .lane = lane, .reads = weight.range(256, 128), .labels = {.phase = "a"}});
  graph.add({.name = "write sum", .lane = lane, .writes = sum, .labels = {.phase = "a"}});
  graph.add({.name = "write", .lane = lane, .writes = weight.range(512, 64), .labels = {.phase = "b"}});
  graph.add({.name = "add", .lane = lane, .accumulates = sum, .labels = {.phase = "b"}});
  const sg::HomePlan plan{.homes = {{.buffer = weight, .unit = "w"}, {.buffer = sum, .unit = "s"}}};
  const sg::WithHomes made = with_homes(graph, plan);
  sg::verify(made.graph);
  const sg::TransferBytes moved = sg::transfer_bytes(made.graph);
  // w: 128 bytes are read, 64 are written. s is written first, so it is not read from its home until it is added to,
  // and its last bytes are never needed.
  CHECK(moved.h2d == 128 + 512);
  CHECK(moved.d2h == 64 + 512);
}
