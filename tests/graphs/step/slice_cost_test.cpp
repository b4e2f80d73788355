#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <vector>

#include "engine/plan/memory_plan.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/allocations.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;

namespace {

// Bytes that building, proving and planning the slice of rank 0 asks for. Each has two microbatches.
std::int64_t cost_of(const sg::Model& model, sg::Plan plan, int dp) {
  plan.layout.dp = dp;
  const sg::BatchSpec batch{.global = 2 * dp, .micro = 1, .seq = 8};
  const std::int64_t before = sg::testing::allocated_bytes();
  const sg::StepGraph step  = sg::training_step(model, plan, batch, {.only = sg::Rank{0}});
  const sg::RunnableGraph runnable(step.graph, sg::plan_memory(step.graph));
  sg::verify(runnable);
  return sg::testing::allocated_bytes() - before;
}

}  // namespace

TEST_CASE("a slice is built, proved and planned at the same cost in a world of any size",
          "[graphs][step][allocations]") {
  if (!sg::testing::counts_allocations()) SKIP("sanitizers have allocators of their own");
  const sg::Model model = GENERATE(sg::testing::small_gpt2, sg::testing::small_llama)(0);
  const sg::Plan plan   = GENERATE(sg::Plan{}, sg::Plan{.layout = {.tp = 2, .pp = 2}},
                                   sg::Plan{.layout = {.pp = 4}, .pipeline = {.schedule = "zb-h1"}});
  CAPTURE(model.kind, to_string(plan.layout));
  const std::int64_t small = cost_of(model, plan, 64);
  CHECK(cost_of(model, plan, 512) == small);
  CHECK(cost_of(model, plan, 4096) == small);
}

// A shard of more ranks touches fewer weights, but may have padding to clear.
TEST_CASE("a slice of a sharded step costs no more in a larger world", "[graphs][step][allocations]") {
  if (!sg::testing::counts_allocations()) SKIP("sanitizers have allocators of their own");
  const sg::Model model    = sg::llama({.layers = 2, .width = 128, .heads = 4, .context = 16, .vocab = 512});
  const sg::Shard strategy = GENERATE(sg::Shard::zero1, sg::Shard::grad_op, sg::Shard::full);
  const sg::Plan plan      = {.layout = {.pp = 2}, .shard = {.strategy = strategy}};
  const std::int64_t small = cost_of(model, plan, 64);
  CAPTURE(to_string(strategy));
  CHECK(cost_of(model, plan, 512) < small + small / 100);
  CHECK(cost_of(model, plan, 4096) < small + small / 100);
}

// One rank chooses for all that are like it, so the others are not built.
TEST_CASE("a choice of offload costs the same in a world of any size", "[graphs][step][allocations]") {
  if (!sg::testing::counts_allocations()) SKIP("sanitizers have allocators of their own");
  const sg::Model model = sg::testing::small_gpt2();
  const sg::Plan plain{.layout = {.tp = 2, .pp = 2}};
  const sg::StepGraph whole = sg::training_step(model, plain, {.global = 2, .micro = 1, .seq = 8});
  const std::int64_t bytes  = sg::plan_memory(whole.graph).device_bytes(sg::Rank{0});
  for (const sg::OffloadPlan& offload :
       {sg::OffloadPlan{.strategy = sg::OffloadStrategy::balanced, .device_bytes = bytes},
        sg::OffloadPlan{.optimizer = true, .device_bytes = bytes - bytes / 8}}) {
    sg::Plan plan            = plain;
    plan.offload             = offload;
    const std::int64_t small = cost_of(model, plan, 64);
    CHECK(cost_of(model, plan, 512) == small);
    CHECK(cost_of(model, plan, 4096) == small);
  }
}
