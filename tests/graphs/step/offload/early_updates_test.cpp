// Without clipping, updates with offloaded states run in the backward pass.
#include "graphs/step/offload/pass/early_updates.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <string>
#include <vector>

#include "backends/storage/spill_file.hpp"
#include "engine/graph/edges.hpp"
#include "graphs/step/training_step.hpp"
#include "ops/transfers/clear.hpp"
#include "ops/updates/optimizer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::small_gpt2;
using sg::testing::train;

namespace {

constexpr sg::BatchSpec early_batch{.global = 4, .micro = 1, .seq = 8};

sg::Lane early_lane() { return {sg::Rank{0}, sg::LaneKind::compute}; }

// The backward passes of two layers, each with a weight `w`, a gradient `g` and two updates, and the norm between them.
struct TwoLayers {
  sg::Graph graph;
  sg::Buffer w0, w1, g0, g1;
  TwoLayers() {
    const auto buffer = [&](const char* name) {
      return graph.buffer({.name = name, .size_bytes = 64, .type = sg::DType::f32});
    };
    w0 = buffer("w0");
    w1 = buffer("w1");
    g0 = buffer("g0");
    g1 = buffer("g1");
    const sg::Buffer sum =
        graph.buffer({.name = "sum", .size_bytes = 8 * sg::exact_sum_size(sg::DType::f32), .type = sg::DType::i64});
    add("weight gradient 1", {}, {g1}, 1, "backward");
    add("input gradient 1", {w1}, {}, 1, "backward");
    add("weight gradient 0", {}, {g0}, 0, "backward");
    add("input gradient 0", {w0}, {}, 0, "backward");
    sg::clear(graph, {.name = "clear", .values = sum});
    sg::square_sum(graph, {.name = "squares of g0", .values = g0, .sum = sum});
    sg::square_sum(graph, {.name = "squares of g1", .values = g1, .sum = sum});
    add("clip", {sum}, {}, -1, "clip");
    add("update w0", {g0}, {w0}, 0, "update");
    add("update more of 1", {g1}, {}, 1, "update");
    add("update w1", {g1}, {w1}, 1, "update");
  }
  void add(const char* name, sg::AccessList reads, sg::AccessList writes, int layer, const char* phase) {
    graph.add({.name   = name,
               .lane   = early_lane(),
               .reads  = std::move(reads),
               .writes = std::move(writes),
               .labels = {.layer = layer, .phase = phase}});
  }
};

}  // namespace

TEST_CASE("an early update follows its gradient and the last reader of its weight, with its layer",
          "[graphs][offload]") {
  const TwoLayers layers;
  const sg::offload::NodeOrder order = sg::offload::with_early_updates(
      layers.graph, std::vector<bool>(layers.graph.num_buffers()), std::vector<bool>(layers.graph.num_nodes()));
  std::vector<std::string> names;
  for (const std::uint32_t node : order.nodes) names.emplace_back(layers.graph.name(sg::Node{node}));
  CHECK(names == std::vector<std::string>{"clear", "weight gradient 1", "squares of g1", "input gradient 1",
                                          "update more of 1", "update w1", "weight gradient 0", "squares of g0",
                                          "input gradient 0", "update w0", "clip"});
}

TEST_CASE("early updates have the bits of updates at the end, in every layout", "[graphs][offload]") {
  const sg::testing::TempFolder folder;
  sg::Plan plain{.optimizer = {.clip = 0}};
  sg::BatchSpec batch = early_batch;
  SECTION("one rank") {}
  SECTION("one microbatch") { batch = {.global = 2, .micro = 2, .seq = 8}; }
  SECTION("dp 2") {
    plain.layout = {.dp = 2};
    plain.shard  = {.bucket_mb = 0.01};
  }
  SECTION("zero1") {
    plain.layout = {.dp = 2};
    plain.shard  = {.strategy = sg::Shard::zero1};
  }
  SECTION("full, reduced each") {
    plain.layout = {.dp = 2};
    plain.shard  = {.strategy = sg::Shard::full, .reduce = sg::ReduceWhen::each};
  }
  SECTION("tp 2") { plain.layout = {.tp = 2}; }
  SECTION("pp 2") { plain.layout = {.pp = 2}; }
  SECTION("recompute in bf16") {
    plain.recompute = sg::Recompute::full;
    plain.precision = {.param = sg::DType::bf16};
  }
  static int seen     = 0;
  const auto expected = train(small_gpt2(), plain, batch, 3);
  for (int others = 0; others < 8; ++others) {
    if (sg::testing::sanitized() && others != 0 && others != 7) continue;
    for (const bool on_host : {true, false}) {
      if (!on_host && others % 3 != 0) continue;
      const bool left_out =
          sg::testing::sanitized() ? sg::testing::left_out(seen, 2) : sg::testing::left_for_the_night(seen, 3);
      if (left_out) continue;  // all run, over the layouts
      CAPTURE(others, on_host);
      sg::Plan plan = plain;
      plan.offload  = {.params      = (others & 1) != 0,
                       .grads       = (others & 2) != 0,
                       .optimizer   = true,
                       .activations = (others & 4) != 0,
                       .slots       = 1 + others % 3};
      sg::TrainerOptions options{.threads = 2, .seed = 7};
      if (!on_host) {  // states on disk are streamed
        plan.offload.disk       = folder.path().string();
        plan.offload.host_bytes = std::int64_t{64} << 10;
        options.storage         = sg::spill_files(plan.offload.disk);
      }
      CHECK(train(small_gpt2(), plan, batch, 3, options) == expected);
    }
  }
}

TEST_CASE("without clipping, updates of the last layers do not wait for the backward pass of the first ones",
          "[graphs][offload]") {
  const bool streams = GENERATE(false, true);
  const double clip  = GENERATE(0.0, 1.0);
  CAPTURE(streams, clip);
  const sg::StepGraph step = sg::training_step(
      small_gpt2(), {.offload = {.optimizer = true, .overlap = clip == 0}, .optimizer = {.clip = clip}}, early_batch,
      {.offload = sg::OffloadAmounts{.optimizer = 1, .host_updates = streams ? 0.0 : 1.0}});
  CHECK_FALSE(step.update_first);
  const sg::Graph& graph = step.graph;
  bool found             = false;
  for (std::uint32_t node = 0; node < graph.num_nodes(); ++node) {
    const sg::Labels labels = graph.labels(sg::Node{node});
    if (graph.op(sg::Node{node}) != "adamw" || labels.layer != step.model.layers - 1) continue;
    found             = true;
    bool waits        = false;
    bool follows_norm = false;
    for (std::uint32_t other = 0; other < graph.num_nodes(); ++other) {
      const sg::Labels of     = graph.labels(sg::Node{other});
      const bool is_last_pass = of.layer == 0 && of.phase == "backward" && of.microbatch == step.num_microbatches - 1;
      const bool is_norm      = graph.name(sg::Node{other}) == "clip";
      if (!(is_last_pass || is_norm) || !sg::reaches(graph, sg::Node{other}, sg::Node{node})) continue;
      (is_norm ? follows_norm : waits) = true;
    }
    CHECK(waits == (clip > 0));
    CHECK(follows_norm == (clip > 0));
  }
  CHECK(found);
}

TEST_CASE("updates are early without clipping and without a loss scale only", "[graphs][offload]") {
  const auto is_early = [](sg::Plan plan) {
    plan.offload.optimizer   = true;
    const sg::StepGraph step = sg::training_step(small_gpt2(), plan, early_batch);
    CHECK(step.update_first == (plan.offload.overlap && !step.offload.settings.early_updates));
    return step.offload.settings.early_updates;
  };
  CHECK(is_early({.optimizer = {.clip = 0}}));
  CHECK(is_early({.precision = {.param = sg::DType::bf16}, .optimizer = {.clip = 0}}));
  CHECK_FALSE(is_early({}));
  CHECK_FALSE(is_early({.offload = {.overlap = false}, .optimizer = {.clip = 0}}));
  CHECK_FALSE(is_early({.precision = {.param = sg::DType::f16}, .optimizer = {.clip = 0}}));
}

TEST_CASE("gradients of early updates are copied down once, and only for the host", "[graphs][offload]") {
  const bool on_host = GENERATE(false, true);
  const bool grads   = GENERATE(false, true);
  CAPTURE(on_host, grads);
  sg::Model model          = small_gpt2();
  const sg::StepGraph step = sg::training_step(
      model, {.offload = {.grads = grads, .optimizer = true}, .optimizer = {.clip = 0}},
      {.global = 2, .micro = 2, .seq = 8},
      {.offload = sg::OffloadAmounts{.optimizer = 1, .grads = grads ? 1.0 : 0.0, .host_updates = on_host ? 1.0 : 0.0}});
  int down = 0, up = 0, updates = 0;
  for (std::uint32_t node = 0; node < step.graph.num_nodes(); ++node) {
    const std::string name(step.graph.name(sg::Node{node}));
    if (name.find(".h.") == std::string::npos) continue;  // of layers; gradients of tied weights wait for each other
    down += name.starts_with("d2h gradient of");
    up += name.starts_with("h2d gradient of");
    const auto lane = step.graph.lane(sg::Node{node});
    updates += name.starts_with("adamw") && lane && lane->kind == sg::LaneKind::host;
  }
  CHECK(up == 0);
  CHECK(down == (on_host ? updates : 0));
  CHECK((updates > 0) == on_host);
}
