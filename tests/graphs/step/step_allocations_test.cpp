#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <vector>

#include "backends/loopback/world.hpp"
#include "tests/support/allocations.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;

namespace {

// Allocations of each of some runs, once everything that is made on first use has been.
template <class Run>
std::vector<std::int64_t> allocations_of(const Run& run) {
  for (int i = 0; i < 10; ++i) run();
  std::vector<std::int64_t> counts;
  for (int i = 0; i < 12; ++i) {
    const std::int64_t before = sg::testing::allocations();
    run();
    counts.push_back(sg::testing::allocations() - before);
  }
  std::sort(counts.begin(), counts.end());
  return counts;
}

// What starting a run costs, whatever is in it: the run of a program with one empty node, on as many threads.
std::int64_t allocations_of_empty_run() {
  sg::Graph graph;
  graph.add({.name = "nothing"}, [] {});
  sg::LoopbackWorld world(1);
  const sg::Program program(graph, world);
  sg::Executor executor({.threads = 2});
  return allocations_of([&] { executor.run(program); }).front();
}

}  // namespace

TEST_CASE("a run of a training step allocates what a run of one empty node does", "[graphs][step][allocations]") {
  if (!sg::testing::counts_allocations()) SKIP("sanitizers have allocators of their own");
  // One rank; all axes; sharded weights; buckets that gradients are copied to and from, with many accesses each; SGD.
  sg::Plan plan   = GENERATE(sg::Plan{}, sg::Plan{.layout = {.dp = 2, .tp = 2, .pp = 2, .sequence_parallel = true}},
                             sg::Plan{.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full}},
                             sg::Plan{.layout = {.dp = 2}, .shard = {.bucket_views = false}},
                             sg::Plan{.layout = {.dp = 2}, .optimizer = {.kind = sg::OptimizerKind::sgd}});
  const auto type = GENERATE(sg::DType::f32, sg::DType::bf16, sg::DType::f16);
  static int seen = 0;
  if (sg::testing::left_for_the_night(seen, 2)) return;  // each plan runs with one or two types
  CAPTURE(to_string(plan.layout), plan.shard.strategy == sg::Shard::full, plan.shard.bucket_views,
          to_string(plan.optimizer.kind), type);
  plan.precision.param = type;
  plan.recompute       = sg::Recompute::full;
  const sg::BatchSpec batch{.global = 8, .micro = 2, .seq = 16};
  const sg::Model model =
      sg::gpt2({.layers = 2, .width = 128, .heads = 4, .context = 16, .vocab = 512, .dropout = 0.1});
  sg::LoopbackWorld world(sg::Layout(plan.layout).num_ranks());
  sg::Trainer trainer(model, plan, batch, world, {.threads = 2, .seed = 7});
  trainer.step(sg::testing::tokens_for(batch, 0, model.vocab));
  const std::vector<std::int64_t> counts = allocations_of([&] { trainer.run().run(); });
  CAPTURE(counts, trainer.run().step().graph.num_nodes());
  // A scheduler's queue may grow in a run in which a thread is kept waiting longer than ever before. That is rare.
  CHECK(counts.front() == allocations_of_empty_run());
  CHECK(counts[counts.size() / 2] == counts.front());
}
