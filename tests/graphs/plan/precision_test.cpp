#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <cmath>
#include <map>

#include "backends/loopback/world.hpp"
#include "engine/base/half.hpp"
#include "engine/plan/memory_plan.hpp"
#include "graphs/schedule/kinds.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using sg::testing::History;
using sg::testing::small_gpt2;
using sg::testing::small_llama;
using sg::testing::train;

namespace {

constexpr sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};

sg::Plan half_plan(sg::DType type, const sg::LayoutSpec& layout = {}) {
  return {.layout = layout, .precision = {.param = type}, .optimizer = {.lr = 3e-3}};
}

}  // namespace

TEST_CASE("bf16 and fp16 training follow fp32 over 200 steps", "[graphs][precision]") {
  const auto model    = GENERATE(small_gpt2, small_llama)(0);
  const int steps     = sg::testing::scale() > 1 ? 10 : 200;
  const auto training = [&](sg::DType type) {
    return train(model, half_plan(type, {.dp = 2, .tp = 2, .pp = 2}), batch, steps, {.threads = 2, .seed = 7},
                 sg::testing::Tokens::chain);
  };
  CAPTURE(model.kind);
  const History exact = training(sg::DType::f32);
  if (steps == 200) CHECK(exact.loss.back() < 0.6 * exact.loss.front());
  for (const auto& [type, bound] : {std::pair{sg::DType::bf16, 1e-2}, std::pair{sg::DType::f16, 2e-3}}) {
    CAPTURE(type);
    const History half = training(type);
    CHECK(sg::testing::loss_distance(half, exact) < bound);
    CHECK(half.loss[0] != exact.loss[0]);
  }
}

TEST_CASE("bf16 and fp16 have the same bits in every pipeline split, schedule, recomputation and number of threads",
          "[graphs][precision]") {
  const auto model        = GENERATE(small_gpt2, small_llama)(0);
  const auto type         = GENERATE(sg::DType::bf16, sg::DType::f16);
  const History reference = train(model, half_plan(type, {.dp = 2, .tp = 2}), batch, 4, {.threads = 1, .seed = 7});
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "zb-h2"}) {
    if (sg::testing::scale() > 1 && std::string(schedule) != "zb-h1") continue;
    sg::Plan plan  = half_plan(type, {.dp = 2, .tp = 2, .pp = 2});
    plan.pipeline  = {.schedule = schedule};
    plan.recompute = sg::Recompute::full;
    CAPTURE(model.kind, type, schedule);
    CHECK(train(model, plan, batch, 4) == reference);
  }
}

TEST_CASE("bf16 and fp16 with sequence parallelism have the same bits in every pipeline split",
          "[graphs][precision][sequence]") {
  const auto model        = GENERATE(small_gpt2, small_llama)(0);
  const auto type         = GENERATE(sg::DType::bf16, sg::DType::f16);
  const History reference = train(model, half_plan(type, {.dp = 2, .tp = 2, .sequence_parallel = true}), batch, 4);
  for (const int pp : {2, 4}) {
    CAPTURE(model.kind, type, pp);
    const sg::LayoutSpec layout{.dp = 2, .tp = 2, .pp = pp, .sequence_parallel = true};
    CHECK(train(model, half_plan(type, layout), batch, 4) == reference);
  }
}

TEMPLATE_TEST_CASE("with bf16 and fp16 the optimizer updates f32 masters, and values are the rounded masters",
                   "[graphs][precision]", sg::bf16, sg::f16) {
  const auto kind = GENERATE(sg::OptimizerKind::adamw, sg::OptimizerKind::sgd);
  sg::Plan plan   = half_plan(*sg::dtype_of<TestType>(), {.dp = 2, .tp = 2, .pp = 2});
  plan.optimizer  = {.kind = kind, .lr = 1e-3};
  sg::LoopbackWorld world(8);
  sg::Trainer trainer(small_gpt2(), plan, batch, world, {.threads = 2, .seed = 7});
  for (int step = 0; step < 3; ++step) trainer.step(sg::testing::tokens_for(batch, step, 64));
  int between            = 0;  // masters that the type cannot represent
  const sg::StepRun& run = trainer.run();
  for (const sg::StepRank& rank : run.step().ranks) {
    for (const sg::StepWeight& weight : rank.weights) {
      if (weight.master.empty()) continue;
      const auto masters = run.memory().span<float>(weight.master.buffer);
      const auto values  = run.memory().template span<TestType>(weight.value.buffer);
      REQUIRE(masters.size() == values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        REQUIRE(values[i].bits() == TestType(masters[i]).bits());
        between += static_cast<float>(values[i]) != masters[i];
      }
    }
  }
  CHECK(between > 1000);
  // Reading and saving use the master.
  const std::string name = "transformer.h.0.ln_1.weight";
  std::vector<float> read(32);
  run.read_tensor(sg::StepRun::Which::value, name, read);
  CHECK(std::any_of(read.begin(), read.end(), [](float v) { return static_cast<float>(TestType(v)) != v; }));
}

TEST_CASE("gradients travel in the chosen type", "[graphs][precision]") {
  const auto model = small_gpt2();
  sg::Plan plan{.layout = {.dp = 2}, .optimizer = {.lr = 3e-3}};
  const History exact       = train(model, plan, batch, 20);
  const auto sent_gradients = [&](const sg::Plan& of) {
    std::map<sg::DType, double> bytes;
    const sg::StepGraph step = sg::training_step(model, of, batch);
    for (std::uint32_t i = 0; i < step.graph.num_nodes(); ++i) {
      const sg::NodeSpec node = step.graph.spec(sg::Node{i});
      if (node.part && node.labels.phase == "reduce") bytes[node.part->type] += node.cost.bytes_sent;
    }
    return bytes;
  };
  const double full = sent_gradients(plan).at(sg::DType::f32);
  for (const sg::DType type : {sg::DType::bf16, sg::DType::f16}) {
    CAPTURE(type);
    plan.precision.reduce = type;
    CHECK(sent_gradients(plan) == std::map<sg::DType, double>{{type, full / 2}});
    const History rounded = train(model, plan, batch, 20);
    CHECK(rounded.loss[0] == exact.loss[0]);
    CHECK(rounded != exact);
    CHECK(sg::testing::loss_distance(rounded, exact) < (type == sg::DType::bf16 ? 1e-3 : 2e-4));
  }
}

TEST_CASE("gradients also travel in the chosen type between the groups of hybrid sharding",
          "[graphs][precision][shard]") {
  const auto reduce = GENERATE(sg::ReduceWhen::last, sg::ReduceWhen::each);
  const bool flat   = GENERATE(true, false);
  CAPTURE(to_string(reduce), flat);
  const auto model = small_gpt2();
  sg::Plan plan{.layout = {.dp = 4},
                .shard = {.strategy = sg::Shard::hybrid, .reduce = reduce, .min_params = 50, .flat = flat, .group = 2}};
  const auto gradients = [&](sg::DType type, bool verify_bits) {
    plan.precision.reduce = type;
    sg::LoopbackWorld world(4);
    sg::Trainer trainer(model, plan, {.global = 8, .micro = 1, .seq = 16}, world,
                        {.threads = 2, .keep_gradients = true, .seed = 7});
    trainer.step(sg::testing::tokens_for({.global = 8, .micro = 1, .seq = 16}, 0, 64));
    std::vector<float> found;
    const sg::StepRun& run = trainer.run();
    int between            = 0;  // gradients that bf16 cannot represent
    for (const sg::StepRank& rank : run.step().ranks) {
      for (const sg::StepWeight& weight : rank.weights) {
        const sg::StoredRange& part = weight.gradient;
        if (part.empty() || weight.tied || run.step().spec(weight).name == "transformer.wte.weight") continue;
        const auto values = run.memory()
                                .span<float>(part.buffer)
                                .subspan(static_cast<std::size_t>(part.offset), static_cast<std::size_t>(part.size()));
        for (const float value : values) between += static_cast<float>(sg::bf16(value)) != value;
        found.insert(found.end(), values.begin(), values.end());
      }
    }
    if (verify_bits) CHECK(between == 0);  // rounded once, after the last sum
    if (!verify_bits) CHECK(between > 1000);
    int sums = 0;
    for (std::uint32_t i = 0; i < run.step().graph.num_nodes(); ++i) {
      if (!run.step().graph.name(sg::Node{i}).starts_with("all_reduce replicas")) continue;
      CHECK(run.step().graph.part(sg::Node{i}).type == type);
      ++sums;
    }
    CHECK(sums >= 4 * 6);  // on each rank for each unit: the embedding, four layers, the head
    return found;
  };
  const auto exact = gradients(sg::DType::f32, false), rounded = gradients(sg::DType::bf16, true);
  REQUIRE(exact.size() == rounded.size());
  double error = 0, size = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error += std::pow(static_cast<double>(exact[i] - rounded[i]), 2);
    size += std::pow(static_cast<double>(exact[i]), 2);
  }
  // Two or three roundings, each by at most 2^-8. Their mean square is smaller.
  CHECK(std::sqrt(error / size) < 0x1p-8);
}

TEST_CASE("gradients of weights tied across two stages are rounded to bf16 or fp16 before they travel",
          "[graphs][precision]") {
  const auto model = GENERATE(small_gpt2, small_llama)(0);
  sg::Plan plan{.layout = {.dp = 2, .pp = 2}, .optimizer = {.lr = 3e-3}};
  const History exact = train(model, plan, batch, 20);
  for (const sg::DType type : {sg::DType::bf16, sg::DType::f16}) {
    CAPTURE(type);
    plan.precision.reduce = type;
    const History rounded = train(model, plan, batch, 20);
    CHECK(rounded.loss[0] == exact.loss[0]);
    CHECK(rounded != exact);
    CHECK(sg::testing::loss_distance(rounded, exact) < (type == sg::DType::bf16 ? 1e-3 : 2e-4));
  }
}

TEST_CASE("bf16 and fp16 halve activations and add masters", "[graphs][precision]") {
  // Weight gradients, which are f32 in both runs, are persistent here. Step memory is then activations and their
  // gradients.
  const auto arena = [](const sg::Plan& plan) {
    const sg::BatchSpec large{.global = 64, .micro = 64, .seq = 16};
    return sg::plan_memory(sg::training_step(small_gpt2(), plan, large, {.keep_gradients = true}).graph)
        .arena(sg::Rank{0});
  };
  const auto type = GENERATE(sg::DType::bf16, sg::DType::f16);
  const auto half = arena(half_plan(type)), full = arena({});
  const std::int64_t parameters = small_gpt2().parameters().num_elements();
  // The master adds four bytes, and the value is two bytes smaller. Small buffers are rounded up to cache lines.
  CHECK(std::abs((half.persistent_bytes - full.persistent_bytes) - 2 * parameters) < 8192);
  const auto step_bytes = [](const sg::ArenaPlan& of) {
    return static_cast<double>(of.lower_bound - of.persistent_bytes);
  };
  const double ratio = step_bytes(half) / step_bytes(full);
  CAPTURE(ratio);
  CHECK(ratio > 0.5);
  CHECK(ratio < 0.55);
}
