// What a training step is made of: its nodes, memory and chains of dependencies; and what it refuses.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "engine/simulate/machine.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/step/memory_requirement.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::WithinRel;

namespace {

sg::Model small_gpt2() { return sg::testing::small_gpt2(); }
// Ranks cannot share the vocabulary, the MLP and the positions evenly. The head is not tied to the embedding.
sg::Model uneven_gpt2() {
  return sg::gpt2({.layers     = 4,
                   .width      = 32,
                   .heads      = 4,
                   .context    = 17,
                   .vocab      = 61,
                   .inner      = 50,
                   .activation = sg::Gelu::exact,
                   .tied       = false});
}
sg::Model small_mlp() { return sg::mlp({.layers = 4, .width = 16, .context = 16, .vocab = 64}); }

constexpr sg::BatchSpec batch_of_8{.global = 8, .micro = 1, .seq = 16};

double sum_of(const sg::Graph& graph, sg::Rank rank, const auto& counts, const auto& figure) {
  double sum = 0;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (graph.rank(sg::Node{i}) == rank && counts(graph.op(sg::Node{i}))) sum += figure(sg::Node{i});
  }
  return sum;
}

}  // namespace

TEST_CASE("tensor-parallel ranks have equal shares of the work and of the weights", "[graphs][step]") {
  const auto model = GENERATE(
      small_gpt2(), sg::llama({.layers = 4, .width = 32, .heads = 4, .kv_heads = 4, .context = 16, .vocab = 64}));
  const int tp = GENERATE(2, 4);
  CAPTURE(model.kind, tp);
  const auto whole   = sg::training_step(model, {}, batch_of_8);
  const auto cut     = sg::training_step(model, {.layout = {.tp = tp}}, batch_of_8);
  const auto product = [](std::string_view op) { return op.starts_with("linear") || op.starts_with("attention"); };
  const auto flops   = [](const sg::StepGraph& step, sg::Rank rank, const auto& counts) {
    return sum_of(step.graph, rank, counts, [&](sg::Node node) { return step.graph.cost(node).flops; });
  };
  const auto matrix_bytes = [](const sg::StepGraph& step, std::size_t rank) {
    std::int64_t bytes = 0;
    for (const auto& weight : step.ranks[rank].weights) {
      if (step.spec(weight).shape.size() > 1 && !weight.tied) bytes += step.graph.spec(weight.value.buffer).size_bytes;
    }
    return static_cast<double>(bytes);
  };
  REQUIRE(flops(whole, sg::Rank{0}, product) > 0);
  // A product declares 2 m n k flops; its matrices have m k, k n and m n elements.
  int products = 0;
  for (std::uint32_t i = 0; i < cut.graph.num_nodes(); ++i) {
    const std::string_view op = cut.graph.op(sg::Node{i});
    if (op != "linear" && op != "linear_gelu") continue;
    double elements = 1;
    for (std::size_t a = 0; a < cut.graph.num_accesses(sg::Node{i}); ++a) {
      const auto access       = cut.graph.access(sg::Node{i}, a);
      const std::string& name = cut.graph.spec(access.buffer).name;
      // Does not count the bias, and the slope that an activation stores beside its result.
      const bool beside = name.find("bias") != std::string::npos || name.find("slope") != std::string::npos;
      if (!beside) elements *= static_cast<double>(access.region.num_bytes()) / 4;
    }
    const double gelu = op == "linear_gelu" ? 20 * 16 * 4 * 32.0 / tp : 0;  // 20 per element, 16 rows
    CHECK_THAT(cut.graph.cost(sg::Node{i}).flops, WithinRel(2 * std::sqrt(elements) + gelu, 1e-9));
    ++products;
  }
  CHECK(products == tp * 8 * (4 * 4 + 1));  // ranks * microbatches * (four products per layer, and the head)
  for (int rank = 0; rank < tp; ++rank) {
    CHECK_THAT(flops(cut, sg::Rank{rank}, product) * tp, WithinRel(flops(whole, sg::Rank{0}, product), 0.02));
    CHECK_THAT(matrix_bytes(cut, static_cast<std::size_t>(rank)) * tp, WithinRel(matrix_bytes(whole, 0), 0.02));
  }
}

TEST_CASE("a microbatch has one buffer of logits, which their gradient overwrites", "[graphs][step]") {
  const auto model = uneven_gpt2();  // no other buffer has this size
  const auto step  = sg::training_step(model, {}, batch_of_8);
  int buffers      = 0;
  for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i)
    buffers += step.graph.spec(sg::Buffer{i}).size_bytes == 16 * 61 * 4;
  CHECK(buffers == 8);
}

TEST_CASE("a pipeline rank holds only its own layers", "[graphs][step]") {
  const auto model = small_gpt2();
  const auto step =
      sg::training_step(model, {.layout = {.pp = 2}, .pipeline = {.schedule = "interleaved", .chunks = 2}}, batch_of_8);
  std::vector<std::vector<int>> layers(2);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (const auto& weight : step.ranks[rank].weights) {
      const int layer = model.blocks[weight.block].layer;
      if (layers[rank].empty() || layers[rank].back() != layer) layers[rank].push_back(layer);
    }
  }
  CHECK(layers == std::vector<std::vector<int>>{{-1, 0, 2}, {1, 3, -1}});
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    const int layer = step.graph.labels(sg::Node{i}).layer;
    if (layer >= 0) CHECK(layer % 2 == sg::index(step.graph.rank(sg::Node{i})));
  }
}

TEST_CASE("the forward of a GPT-2 layer is eight nodes, plus one node per tensor-parallel collective",
          "[graphs][step]") {
  const auto count = [](int tp, bool parts) {
    const auto step = sg::training_step(small_gpt2(), {.layout = {.tp = tp}}, batch_of_8);
    int nodes       = 0;
    for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
      const auto labels = step.graph.labels(sg::Node{i});
      nodes += labels.layer == 2 && labels.microbatch == 3 && labels.phase == "forward" &&
               step.graph.rank(sg::Node{i}) == sg::Rank{0} && step.graph.has_part(sg::Node{i}) == parts;
    }
    return nodes;
  };
  // Norm, three products and attention, residual with norm, product with GELU, residual.
  CHECK(count(1, false) == 8);
  CHECK(count(2, false) == 8);
  CHECK(count(1, true) == 0);
  CHECK(count(2, true) == 2);
}

// The longest chain counts data dependencies, messages, and the order of computation on each rank. Communication lanes
// and memory reuse may add to it.
TEST_CASE("a simulated step takes at most 1.1 times as long as its longest chain of dependencies", "[graphs][step]") {
  const std::string schedule = GENERATE("1f1b", "gpipe", "zb-h1", "zb-h2");
  CAPTURE(schedule);
  const auto model = sg::gpt2({.layers = 4, .width = 256, .heads = 8, .context = 128, .vocab = 4096});
  const auto step =
      sg::training_step(model, {.layout = {.dp = 2, .tp = 2, .pp = 2}, .pipeline = {.schedule = schedule}},
                        {.global = 16, .micro = 2, .seq = 128});
  const auto plan = sg::plan_memory(step.graph);
  const sg::Machine machine =
      sg::two_level_machine({.ranks   = 8,
                             .inside  = {.latency_s = 2e-6, .bytes_per_s = 100e9},
                             .between = {.latency_s = 5e-6, .bytes_per_s = 25e9},
                             .rates   = {.compute = {.flops_per_s = 10e12, .bytes_per_s = 1e12, .overhead_s = 1e-6}}});
  const double makespan = sg::simulate({step.graph, plan}, machine).makespan_s;

  // The same graph with compute lanes only, and without the memory plan.
  sg::Graph free(8);
  for (std::uint32_t b = 0; b < step.graph.num_buffers(); ++b) (void)free.buffer(step.graph.spec(sg::Buffer{b}));
  for (std::uint32_t g = 0; g < step.graph.num_groups(); ++g) (void)free.group(step.graph.spec(sg::Group{g}));
  for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
    sg::NodeSpec spec = step.graph.spec(sg::Node{i});
    if (spec.lane && spec.lane->kind != sg::LaneKind::compute) {
      spec.rank = spec.lane->rank;
      spec.lane.reset();
    }
    free.add(spec, step.graph.body(sg::Node{i}));
  }
  const double chain = sg::simulate(free, machine).makespan_s;
  CAPTURE(makespan, chain);
  CHECK(makespan <= 1.1 * chain);
}

TEST_CASE("a step refuses a layout, batch or schedule that does not fit, by name", "[graphs][step]") {
  const auto refuses = [](const sg::Model& model, const sg::Plan& plan, const sg::BatchSpec& batch, const char* why) {
    CHECK_THROWS_WITH(sg::training_step(model, plan, batch), ContainsSubstring(why));
  };
  refuses(small_gpt2(), {.layout = {.pp = 3}}, batch_of_8, "4 layers");
  refuses(small_gpt2(), {.layout = {.dp = 3}}, batch_of_8, "dp 3");
  refuses(small_gpt2(), {.layout = {.tp = 8}}, batch_of_8, "heads");
  refuses(small_gpt2(), {}, {.global = 8, .micro = 3, .seq = 16}, "micro");
  refuses(small_gpt2(), {}, {.global = 8, .micro = 1, .seq = 17}, "context of 16");
  refuses(small_gpt2(), {.pipeline = {.schedule = "1f1p"}}, batch_of_8, "1f1p");
  refuses(small_gpt2(), {.layout = {.pp = 2}, .pipeline = {.chunks = 2}}, batch_of_8, "1f1b");
  refuses(small_gpt2(), {.layout = {.pp = 2}, .pipeline = {.split = {4}}}, batch_of_8, "(4) has 1 entries");
  refuses(small_gpt2(), {.layout = {.pp = 2}, .pipeline = {.split = {2, 1}}}, batch_of_8, "adds up to 3");
  refuses(small_gpt2(), {.layout = {.pp = 2}, .pipeline = {.split = {4, 0}}}, batch_of_8, "a stage that has none");
}

TEST_CASE("a step that would take all memory is refused before it is built", "[graphs][step]") {
  const auto refuses = [](const sg::Plan& plan, const sg::BatchSpec& batch, const char* why) {
    CHECK_THROWS_WITH(sg::training_step(small_gpt2(), plan, batch), ContainsSubstring(why));
    CHECK_THROWS_WITH(sg::forward_step(small_gpt2(), plan, batch), ContainsSubstring("step: about "));
  };
  refuses({}, {.global = 1 << 20, .micro = 1, .seq = 16},
          "step: about 113246228 nodes: 6 blocks x 1048576 microbatches x 1 data-parallel x 1 tensor-parallel ranks, 1 "
          "ranks in all (at most 2097152 nodes; a larger batch.micro");
  refuses({.layout = {.dp = 1 << 20, .pp = 4}}, {.global = 1 << 20, .micro = 1, .seq = 16}, "4194304 ranks in all");
  CHECK_THROWS_WITH(sg::memory_requirements(small_gpt2(), {.layout = {.dp = 1 << 20, .tp = 4, .pp = 4}},
                                            {.global = 1 << 20, .micro = 1, .seq = 16}),
                    ContainsSubstring("step: about "));
  // Recomputation and expanded collectives count too.
  CHECK_THROWS_WITH(
      sg::training_step(small_gpt2(), {.recompute = sg::Recompute::full}, {.global = 18'000, .micro = 1, .seq = 16}),
      ContainsSubstring("step: about 2484020 nodes"));
  if (sg::testing::sanitized()) return;  // takes long; tests of expansions have this refusal with fewer ranks
  CHECK_THROWS_WITH(sg::training_step(small_gpt2(), {.layout = {.dp = 1024}, .algorithm = sg::Algorithm::ring},
                                      {.global = 1024, .micro = 1, .seq = 16}),
                    ContainsSubstring("expand: the algorithm ring makes about ") &&
                        ContainsSubstring(" nodes (at most 2097152; the algorithm direct or tree, or smaller groups)"));
}

TEST_CASE("an inconsistent model is refused by name", "[graphs][step]") {
  const auto refuses = [](const auto& change, const char* why) {
    sg::Model model = small_mlp();
    change(model);
    CHECK_THROWS_WITH(sg::training_step(model, {.layout = {.pp = 2}}, batch_of_8), ContainsSubstring(why));
  };
  refuses([](sg::Model& model) { model.blocks[1].weights.push_back({.name = "idle", .shape = {4}}); },
          "weight 'idle' of block 'layer0': no op adds to its gradient");
  refuses([](sg::Model& model) { model.layers = 3; }, "model 'mlp': 3 layers, but 4 blocks are layers");
  refuses([](sg::Model& model) { model.blocks[2].forward = {}; }, "block 'layer1' has no forward pass");
  refuses([](sg::Model& model) { std::swap(model.blocks[4], model.blocks[5]); }, "is separated from the other layers");
  refuses([](sg::Model& model) { model.blocks[1].weights[0].shape = {}; }, "has shape scalar and is cut along dim 0");
  refuses([](sg::Model& model) { model.blocks[1].weights[1].name = model.blocks[1].weights[0].name; },
          "weight 'layers.0.up.weight' of block 'layer0' is declared twice");
  refuses([](sg::Model& model) { model.blocks[1].weights[0].sections = {{.tensor = "t", .size = 3}}; },
          "has sections with a total size of 3");
  refuses([](sg::Model& model) { model.blocks[5].forward = [](sg::Tape&, const sg::Tensor& x) { return x; }; },
          "(logits of shape 16x64)");
}

TEST_CASE("an impossible plan is refused by name", "[graphs][step]") {
  const auto refuses = [](const sg::Plan& plan, const char* why) {
    CHECK_THROWS_WITH(sg::training_step(small_mlp(), plan, batch_of_8), ContainsSubstring(why));
  };
  refuses({.optimizer = {.lr = -1}}, "optimizer.lr: -1 (0 or more)");
  refuses({.optimizer = {.beta2 = 1}}, "optimizer.beta2: 1 (0 or more, below 1)");
  refuses({.optimizer = {.clip = std::nan("")}}, "optimizer.clip: nan");
  refuses({.layout = {.tp = 65}}, "layout: tp(65) is more than a vocabulary of 64 can be split into (at most 64)");
  sg::Model model = small_mlp();
  model.inner     = 3;
  CHECK_THROWS_WITH(sg::training_step(model, {.layout = {.tp = 4}}, batch_of_8),
                    "layout: tp(4) is more than an MLP of width 3 can be split into (at most 3)");
  model.inner = 0;  // no MLP
  CHECK_THROWS_WITH(sg::training_step(model, {.layout = {.tp = 65}}, batch_of_8),
                    "layout: tp(65) is more than a vocabulary of 64 can be split into (at most 64)");
  refuses({.precision = {.param = sg::DType::i32}}, "precision.param: i32 (fp32, fp64, bf16 or fp16)");
  refuses({.precision = {.reduce = sg::DType::f16, .loss_scale = {.scaling = sg::Scaling::none}}},
          "precision.reduce: fp16 reduce without scaling");
  refuses({.precision = {.loss_scale = {.scaling = sg::Scaling::fixed, .value = 0}}},
          "precision.loss_scale: 0 (above 0)");
  refuses({.precision = {.param = sg::DType::f64, .reduce = sg::DType::bf16}},
          "precision.reduce: bf16 with param fp64 (fp64)");
  refuses({.precision = {.reduce = sg::DType::f64}}, "precision.reduce: fp64 with param fp32 (fp32, bf16 or fp16)");
}
