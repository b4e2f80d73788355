// Recomputation in training steps: bits, work and memory. recompute_test.cpp tests the pass on graphs.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <sstream>

#include "backends/loopback/world.hpp"
#include "engine/draw/dot.hpp"
#include "engine/graph/edges.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/step/recompute.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr sg::BatchSpec batch_of_4{.global = 4, .micro = 1, .seq = 8};
constexpr sg::OptimizerPlan clipping{.lr = 1e-2, .clip = 0.05};

sg::Model small_gpt2(int layers) {
  return sg::gpt2({.layers = layers, .width = 16, .heads = 4, .context = 8, .vocab = 32});
}
sg::Model small_llama(int layers) {
  return sg::llama(
      {.layers = layers, .width = 16, .heads = 4, .kv_heads = 2, .context = 8, .vocab = 32, .inner = 40, .tied = true});
}

// The loss, the norm and the gradients of all weights on all ranks, for every step.
struct History {
  std::vector<double> loss, grad_norm;
  std::vector<float> gradients;
  friend bool operator==(const History&, const History&) = default;
};

History train(const sg::Model& model, const sg::Plan& plan, int steps) {
  sg::LoopbackWorld world(sg::Layout(plan.layout).num_ranks());
  sg::Trainer trainer(model, plan, batch_of_4, world, {.threads = 2, .keep_gradients = true});
  sg::set_fresh_weights(trainer.run(), 7);
  History history;
  for (int step = 0; step < steps; ++step) {
    const auto result = trainer.step(sg::testing::tokens_for(batch_of_4, step, model.vocab));
    history.loss.push_back(result.loss);
    history.grad_norm.push_back(result.grad_norm);
    for (const sg::StepRank& rank : trainer.run().step().ranks) {
      for (const sg::StepWeight& weight : rank.weights) {
        const auto values = trainer.run().memory().span<float>(weight.gradient.buffer);
        history.gradients.insert(history.gradients.end(), values.begin(), values.end());
      }
    }
  }
  return history;
}

std::vector<sg::Plan> plans() {
  std::vector<sg::Plan> out;
  const auto add = [&](const sg::LayoutSpec& layout, const char* schedule, int chunks = 1) {
    out.push_back({.layout = layout, .pipeline = {.schedule = schedule, .chunks = chunks}, .optimizer = clipping});
  };
  for (const auto& layout : {sg::LayoutSpec{}, sg::LayoutSpec{.tp = 2}, sg::LayoutSpec{.pp = 2},
                             sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2}}) {
    add(layout, "1f1b");
    add(layout, "zb-h1");
    if (layout.pp > 1) add(layout, "interleaved", 2);
  }
  for (const auto algorithm :
       {sg::Algorithm::ring, sg::Algorithm::tree, sg::Algorithm::hierarchical, sg::Algorithm::adaptive}) {
    add({.dp = 2, .tp = 2, .devices_per_node = 2}, "1f1b");
    out.back().algorithm = algorithm;
  }
  add({.tp = 2, .sequence_parallel = true}, "1f1b");
  add({.dp = 2, .tp = 2, .pp = 2, .sequence_parallel = true}, "zb-h1");
  return out;
}

}  // namespace

TEST_CASE("recomputation changes no bit of losses, norms and gradients", "[graphs][recompute]") {
  const auto make = GENERATE(small_gpt2, small_llama);
  const auto all  = plans();
  for (std::size_t i = 0; i < all.size(); i += static_cast<std::size_t>(sg::testing::scale())) {
    sg::Plan plan         = all[i];
    const sg::Model model = make(plan.pipeline.chunks * 2);
    CAPTURE(model.kind, to_string(plan.layout), plan.pipeline.schedule, plan.algorithm);
    const History reference = train(model, plan, 2);
    for (const auto kind : {sg::Recompute::selective, sg::Recompute::full}) {
      CAPTURE(kind);
      plan.recompute = kind;
      CHECK(train(model, plan, 2) == reference);  // the trainer also verifies the step
    }
  }
}

TEST_CASE("full recomputation repeats a layer up to its last product, selective only its attention",
          "[graphs][recompute]") {
  const auto model     = GENERATE(small_gpt2, small_llama)(2);
  const auto kind      = GENERATE(sg::Recompute::selective, sg::Recompute::full);
  const int tp         = GENERATE(1, 2);
  const char* schedule = GENERATE("1f1b", "zb-h1");
  CAPTURE(model.kind, kind, tp, schedule);
  sg::Plan plan{.layout = {.tp = tp}, .pipeline = {.schedule = schedule}};
  const sg::Graph before = sg::training_step(model, plan, batch_of_4).graph;
  plan.recompute         = kind;
  const sg::Graph after  = sg::training_step(model, plan, batch_of_4).graph;

  // The nodes to repeat, by name: all forward nodes of a rank, microbatch and layer before the last product.
  std::map<std::pair<sg::Rank, std::string>, double> expected;
  std::map<std::tuple<sg::Rank, int, int>, std::vector<sg::Node>> layers;
  double flops = 0, flops_after = 0;
  for (std::uint32_t i = 0; i < before.num_nodes(); ++i) {
    const sg::Node node{i};
    flops += before.cost(node).flops;
    const sg::Labels labels = before.labels(node);
    if (labels.phase != "forward" || labels.layer < 0) continue;
    layers[{before.rank(node), labels.microbatch, labels.layer}].push_back(node);
  }
  int num_expected = 0;
  for (const auto& [place, nodes] : layers) {
    auto end = nodes.end();
    while (before.op(*--end) != "linear") {
    }
    for (auto node = nodes.begin(); node != end; ++node) {
      if (kind == sg::Recompute::selective && before.op(*node) != "attention") continue;
      expected[{before.rank(*node), "recompute " + std::string(before.name(*node))}] += before.cost(*node).flops;
      flops += before.cost(*node).flops;
      ++num_expected;
    }
  }
  std::map<std::pair<sg::Rank, std::string>, double> found;
  int num_found = 0, parts = 0;
  for (std::uint32_t i = 0; i < after.num_nodes(); ++i) {
    const sg::Node node{i};
    flops_after += after.cost(node).flops;
    if (after.labels(node).phase != "recompute") continue;
    found[{after.rank(node), std::string(after.name(node))}] += after.cost(node).flops;
    ++num_found;
    parts += after.has_part(node);
  }
  CHECK(found == expected);
  CHECK(num_found == num_expected);
  CHECK(after.num_nodes() == before.num_nodes() + static_cast<std::uint32_t>(num_expected));
  CHECK(flops_after == flops);                                               // integers, so sums are exact
  CHECK(parts == (kind == sg::Recompute::full && tp == 2 ? 2 * 4 * 2 : 0));  // ranks, microbatches, layers
}

TEST_CASE("recomputation keeps buffer ids, and does not change a step without a backward", "[graphs][recompute]") {
  const auto model = small_gpt2(2);
  const auto kind  = GENERATE(sg::Recompute::selective, sg::Recompute::full);
  sg::Plan plan{.layout = {.tp = 2, .pp = 2}};
  const auto before  = sg::training_step(model, plan, batch_of_4);
  const auto forward = sg::forward_step(model, plan, batch_of_4);
  plan.recompute     = kind;
  const auto after   = sg::training_step(model, plan, batch_of_4);
  CHECK(sg::forward_step(model, plan, batch_of_4).graph == forward.graph);
  CHECK(sg::recompute(before.graph, sg::Recompute::none) == before.graph);
  CHECK(sg::recompute(after.graph, kind) == after.graph);  // the pass is idempotent
  REQUIRE(after.graph.num_buffers() > before.graph.num_buffers());
  for (std::uint32_t i = 0; i < before.graph.num_buffers(); ++i) {
    CHECK(after.graph.spec(sg::Buffer{i}) == before.graph.spec(sg::Buffer{i}));
  }
  CHECK(sg::find_flaws(after.graph).empty());
  std::ostringstream drawing;
  sg::write_dot(after, drawing, {.detail = sg::Detail::layer});
  CHECK_THAT(drawing.str(), ContainsSubstring("recompute"));
}

TEST_CASE("a stage's last layer can be recomputed before the gradient of its output arrives", "[graphs][recompute]") {
  const auto step =
      sg::training_step(small_gpt2(2), {.layout = {.pp = 2}, .recompute = sg::Recompute::full}, batch_of_4);
  std::vector<sg::Node> received, repeated;
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    const sg::Labels labels = step.graph.labels(sg::Node{i});
    if (labels.microbatch != 0 || step.graph.rank(sg::Node{i}) != sg::Rank{0}) continue;
    if (step.graph.op(sg::Node{i}) == "recv") received.push_back(sg::Node{i});
    if (labels.phase == "recompute") repeated.push_back(sg::Node{i});
  }
  REQUIRE(received.size() == 1);
  REQUIRE(repeated.size() == 6);  // all but the MLP's second product and the residual
  for (const sg::Node node : repeated) CHECK_FALSE(sg::reaches(step.graph, received.front(), node));
}

namespace {

// A microbatch has 128 rows: 2 sequences of 64 tokens.
constexpr sg::BatchSpec batch_of_8{.global = 8, .micro = 2, .seq = 64};
constexpr std::int64_t rows = 128, width = 64, heads = 4, kv_width = 32, inner = 1024, vocab = 48, element = 4;

sg::Model sized(bool llama, int layers) {
  if (llama) {
    return sg::llama(
        {.layers = layers, .width = 64, .heads = 4, .kv_heads = 2, .context = 64, .vocab = 48, .inner = 1024});
  }
  return sg::gpt2({.layers = layers, .width = 64, .heads = 4, .context = 64, .vocab = 48, .inner = 1024});
}

// The bytes of one layer that are kept for one microbatch from its forward to its backward.
std::int64_t kept_bytes(bool llama, sg::Recompute kind) {
  const std::int64_t input = rows * width, attention = rows * width, log_sums = rows * heads;
  if (kind == sg::Recompute::full) return element * input;
  const std::int64_t norms  = 2 * rows * width + rows * (llama ? 2 : 4);  // outputs, scales, and centers of layer norms
  const std::int64_t qkv    = rows * (llama ? width + 2 * kv_width : 3 * width);
  const std::int64_t middle = rows * width;                    // the first residual
  const std::int64_t mlp    = rows * inner * (llama ? 3 : 2);  // before and after the activation
  const std::int64_t all    = input + norms + qkv + attention + log_sums + middle + mlp;
  return element * (kind == sg::Recompute::selective ? all - attention - log_sums : all);
}

// The largest number of bytes of step memory alive at once, by rank. Without losses and sums of squares, which are
// alive during the whole step. Gradients are persistent here.
std::vector<std::int64_t> peaks(const sg::StepGraph& step) {
  const sg::MemoryPlan plan = sg::plan_memory(step.graph);
  std::vector<std::int64_t> out;
  for (int rank = 0; rank < step.graph.num_ranks(); ++rank) {
    const auto arena = plan.arena(sg::Rank{rank});
    out.push_back(arena.lower_bound - arena.persistent_bytes);
  }
  constexpr std::int64_t line = sg::MemoryPlan::alignment;
  for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i) {
    const sg::BufferSpec& buffer = step.graph.spec(sg::Buffer{i});
    if (buffer.name != "squares" && buffer.name != "losses") continue;
    out[static_cast<std::size_t>(sg::index(buffer.rank))] -= (buffer.size_bytes + line - 1) / line * line;
  }
  return out;
}

}  // namespace

TEST_CASE("each layer adds the bytes it keeps to the planned peak, for every microbatch in flight",
          "[graphs][recompute]") {
  const bool llama = GENERATE(false, true);
  const auto kind  = GENERATE(sg::Recompute::none, sg::Recompute::selective, sg::Recompute::full);
  const int pp     = GENERATE(1, 2);
  CAPTURE(llama, kind, pp);
  const sg::Plan plan{.layout = {.pp = pp}, .recompute = kind};
  const auto few  = peaks(sg::training_step(sized(llama, pp), plan, batch_of_8, {.keep_gradients = true}));
  const auto more = peaks(sg::training_step(sized(llama, 2 * pp), plan, batch_of_8, {.keep_gradients = true}));
  for (int rank = 0; rank < pp; ++rank) {
    CAPTURE(rank);
    const auto at = static_cast<std::size_t>(rank);
    CHECK(more[at] - few[at] == (pp - rank) * kept_bytes(llama, kind));
  }
}

TEST_CASE("the planned peak is the kept bytes of all layers plus the activations of one layer or of the head",
          "[graphs][recompute]") {
  const auto kind  = GENERATE(sg::Recompute::none, sg::Recompute::selective, sg::Recompute::full);
  const int layers = GENERATE(1, 4);
  CAPTURE(kind, layers);
  const auto step = sg::training_step(sized(false, layers), {.recompute = kind}, batch_of_8, {.keep_gradients = true});
  // At the last product of a layer's MLP, which is the first in its backward. All activations of the layer exist (with
  // selective, not yet the recomputed attention), and the gradient of the product's output. The activated tensor is
  // not needed after the weight gradient; the gradient through the activation is as large.
  const std::int64_t of_layer =
      kept_bytes(false, kind == sg::Recompute::full ? sg::Recompute::none : kind) - kept_bytes(false, kind);
  const std::int64_t at_product = of_layer + element * rows * width;
  // Or at the product of the head: its input before and after the norm, the scales and centers of the norm, the
  // gradient of the normed tensor, and the logits.
  const std::int64_t at_head = element * rows * (3 * width + 2 + vocab);
  CHECK(peaks(step)[0] == layers * kept_bytes(false, kind) + std::max(at_product, at_head));
}

// W reads the same activations as I. If all I of a stage come before its W, all of its layers are recomputed by then.
TEST_CASE("if W is apart from I, recomputed activations stay until both have read them", "[graphs][recompute]") {
  const auto of = [](sg::Recompute kind, const char* schedule) {
    const sg::Plan plan{.layout = {.pp = 2}, .pipeline = {.schedule = schedule}, .recompute = kind};
    return peaks(sg::training_step(sized(false, 4), plan, batch_of_8, {.keep_gradients = true}));
  };
  const auto together = of(sg::Recompute::none, "1f1b"), together_again = of(sg::Recompute::full, "1f1b");
  const auto apart = of(sg::Recompute::none, "zb-h1"), apart_again = of(sg::Recompute::full, "zb-h1");
  CHECK(together_again[0] < together[0] / 2);
  CHECK(apart_again[0] < apart[0] * 2 / 3);
  CHECK(apart_again[1] == apart[1]);
}
