#include "graphs/step/training_step.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>

#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/models/mlp.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/validate.hpp"
#include "graphs/step/pipeline.hpp"
#include "tests/support/graphs/rank_sets.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::WithinRel;
using sg::testing::History;

namespace {

sg::Model small_gpt2() { return sg::testing::small_gpt2(); }
sg::Model small_llama() { return sg::testing::small_llama(); }
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
sg::Model biased_llama() {
  return sg::llama({.layers         = 4,
                    .width          = 24,
                    .heads          = 4,
                    .kv_heads       = 1,
                    .head_size      = 8,
                    .context        = 16,
                    .vocab          = 63,
                    .inner          = 37,
                    .attention_bias = true,
                    .mlp_bias       = true});
}
sg::Model small_mlp() { return sg::mlp({.layers = 4, .width = 16, .context = 16, .vocab = 64}); }

History train(const sg::Model& model, const sg::Plan& plan, const sg::BatchSpec& batch, int steps, int threads = 2) {
  return sg::testing::train(model, plan, batch, steps, {.threads = threads, .seed = 7});
}

// All elements, or every fourth in sanitized builds.
template <class List>
auto some_of(const List& list) {
  std::vector<typename List::value_type> some;
  const std::size_t stride = sg::testing::scale() > 1 ? 4 : 1;
  for (std::size_t i = 0; i < list.size(); i += stride) some.push_back(list[i]);
  return some;
}

constexpr sg::BatchSpec batch_of_8{.global = 8, .micro = 1, .seq = 16};
// The clip is below all norms, so gradients are clipped in every step.
constexpr sg::OptimizerPlan clipping{.lr = 1e-2, .clip = 0.05};

}  // namespace

TEST_CASE("losses and norms have the same bits in every pipeline split, schedule and number of threads",
          "[graphs][step]") {
  const auto model    = GENERATE(small_gpt2, small_llama)();
  const auto [dp, tp] = GENERATE(std::pair{1, 1}, std::pair{2, 2});
  const int steps     = sg::testing::sanitized() ? 3 : sg::testing::compared_steps(20);
  CAPTURE(model.kind, dp, tp);
  if (dp == 1 && sg::testing::scale() > 1) return;
  const History reference = train(model, {.layout = {.dp = dp, .tp = tp}, .optimizer = clipping}, batch_of_8, steps, 1);
  CHECK(reference.loss.back() < reference.loss.front());
  CHECK(*std::min_element(reference.grad_norm.begin(), reference.grad_norm.end()) > clipping.clip);
  for (const int pp : {1, 2, 4}) {
    for (const sg::ScheduleKind kind : some_of(sg::all_schedule_kinds)) {
      if (is_v_shaped(kind) && pp == 4) continue;  // the models have four layers
      const int chunks = kind == sg::ScheduleKind::interleaved && pp < 4 ? 2 : 1;
      sg::Plan plan{.layout    = {.dp = dp, .tp = tp, .pp = pp},
                    .pipeline  = {.schedule = std::string(to_string(kind)), .chunks = chunks},
                    .optimizer = clipping};
      const bool in_order = sg::validate(sg::schedule_of(plan.pipeline, pp, 8 / dp)).weights_in_order;
      CHECK(in_order == (kind != sg::ScheduleKind::sequential));
      if (!in_order) continue;
      static int seen = 0;
      if (sg::testing::left_out(seen, 5)) continue;
      CAPTURE(pp, kind);
      CHECK(train(model, plan, batch_of_8, steps, 2) == reference);
      if (kind == sg::ScheduleKind::zb_h1) CHECK(train(model, plan, batch_of_8, steps, 1) == reference);
    }
  }
}

TEST_CASE("a given number of layers for each stage trains to the same bits", "[graphs][step]") {
  const auto model = GENERATE(small_gpt2, small_llama)();
  if (sg::testing::sanitized() && model.kind == "gpt2") return;
  const int steps         = sg::testing::cases(5);
  const History reference = train(model, {.optimizer = clipping}, batch_of_8, steps, 1);
  for (const std::vector<int>& split : {std::vector{3, 1}, std::vector{1, 3}, std::vector{1, 2, 1}}) {
    const int pp = static_cast<int>(split.size());
    CAPTURE(split);
    const sg::Plan plan{.layout = {.pp = pp}, .pipeline = {.split = split}, .optimizer = clipping};
    CHECK(train(model, plan, batch_of_8, steps, 2) == reference);
  }
  const sg::Plan zero_bubble{
      .layout = {.pp = 2}, .pipeline = {.schedule = "zb-h1", .split = {3, 1}}, .optimizer = clipping};
  CHECK(train(model, zero_bubble, batch_of_8, steps, 2) == reference);
  const auto blocks = sg::blocks_of_stages(model, 2, {3, 1});
  CHECK(blocks[0].size() > blocks[1].size());
}

TEST_CASE("training twice gives the same bits", "[graphs][step]") {
  const sg::Plan plan{.layout = {.dp = 2, .tp = 2, .pp = 2}, .optimizer = clipping};
  const int steps = sg::testing::sanitized() ? 2 : 5;
  CHECK(train(small_gpt2(), plan, batch_of_8, steps) == train(small_gpt2(), plan, batch_of_8, steps));
}

TEST_CASE("all layouts, orders of ranks, memory reuse and collective algorithms agree within rounding",
          "[graphs][step]") {
  const auto model = GENERATE(small_gpt2, small_llama, small_mlp, uneven_gpt2, biased_llama)();
  if (sg::testing::scale() > 1 && model.vocab == 64) return;  // sanitized builds test the odd sizes only
  const sg::Plan one      = {.precision = {.param = sg::DType::f64}, .optimizer = clipping};
  const int steps         = sg::testing::sanitized() ? 2 : 3;
  const History reference = train(model, one, batch_of_8, steps);
  std::vector<sg::Plan> plans;
  for (const auto& layout : {sg::LayoutSpec{.dp = 2},
                             {.tp = 4},
                             {.pp = 4},
                             {.dp = 2, .tp = 2, .pp = 2},
                             {.dp = 2, .tp = 2, .pp = 2, .order = "dp-tp-pp"},
                             {.dp = 4, .tp = 2},
                             {.tp = 4, .sequence_parallel = true},
                             {.dp = 2, .tp = 2, .pp = 2, .sequence_parallel = true}}) {
    plans.push_back(one);
    plans.back().layout = layout;
  }
  for (const auto algorithm :
       {sg::Algorithm::ring, sg::Algorithm::tree, sg::Algorithm::hierarchical, sg::Algorithm::adaptive}) {
    plans.push_back(one);
    plans.back().layout    = {.dp = 2, .tp = 2, .pp = 2, .devices_per_node = 4};
    plans.back().algorithm = algorithm;
  }
  plans.push_back(one);
  plans.back().layout = {.dp = 2, .tp = 2, .pp = 2};
  plans.back().reuse  = sg::Reuse::free;
  for (const sg::Plan& plan : some_of(plans)) {
    CAPTURE(model.kind, to_string(plan.layout), plan.algorithm);
    const History history = train(model, plan, batch_of_8, steps);
    for (std::size_t i = 0; i < history.loss.size(); ++i) {
      CHECK_THAT(history.loss[i], WithinRel(reference.loss[i], 1e-12));
      CHECK_THAT(history.grad_norm[i], WithinRel(reference.grad_norm[i], 1e-10));
    }
  }
}

TEST_CASE("a slice of one rank, or of several, can be built alone", "[graphs][step]") {
  const auto model     = GENERATE(small_gpt2, small_llama)();
  const auto recompute = GENERATE(sg::Recompute::none, sg::Recompute::selective, sg::Recompute::full);
  static int seen      = 0;
  if (sg::testing::left_out(seen, 2)) return;
  const sg::Plan plan{.layout    = {.dp = 2, .tp = 2, .pp = 2},
                      .pipeline  = {.schedule = "interleaved", .chunks = 2},
                      .recompute = recompute};
  const sg::StepGraph step = sg::training_step(model, plan, batch_of_8);
  for (const sg::RankSet& ranks : sg::testing::rank_sets(8)) {
    CAPTURE(model.kind, recompute, to_string(ranks));
    CHECK(sg::training_step(model, plan, batch_of_8, {.only = ranks}).graph == sg::slice(step.graph, ranks));
  }
}
