#include "graphs/step/shard_report.hpp"

#include <catch2/catch_test_macros.hpp>

#include "graphs/step/training_step.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;

TEST_CASE("sharding statistics count what is offloaded beside the device", "[graphs][shard][offload]") {
  constexpr sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};
  const auto stats_of = [&](const sg::OffloadPlan& offload) {
    const sg::Plan plan{.layout = {.dp = 2}, .shard = {.strategy = sg::Shard::full}, .offload = offload};
    const sg::StepGraph step = sg::training_step(sg::testing::small_gpt2(), plan, batch);
    return sg::shard_stats(step, sg::plan_memory(step.graph), sg::Rank{0});
  };
  const sg::ShardStats on_device = stats_of({});
  CHECK(on_device.beside_bytes == 0);
  // fp32: weights, and two moments of the same size.
  const sg::ShardStats states = stats_of({.optimizer = true});
  CHECK(states.current_bytes + states.beside_bytes == on_device.current_bytes);
  CHECK(states.beside_bytes > on_device.current_bytes / 2);
  CHECK(states.current_bytes < on_device.current_bytes / 2);
  CHECK(states.whole_bytes == on_device.whole_bytes);
  // Compression changes how many bytes lie there, but not which tensors do.
  const sg::ShardStats packed = stats_of({.optimizer = true, .compress = sg::Compression::int8});
  CHECK(packed.current_bytes == states.current_bytes);
  CHECK(packed.beside_bytes == states.beside_bytes);
  const sg::ShardStats all = stats_of({.params = true, .optimizer = true});
  CHECK(all.current_bytes < states.current_bytes);
  CHECK(all.current_bytes + all.beside_bytes == on_device.current_bytes);
}
