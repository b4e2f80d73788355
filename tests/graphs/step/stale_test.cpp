// The graphs of steps that apply earlier gradients: what waits for what, and which buffers they have.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <set>
#include <sstream>

#include "engine/base/error.hpp"
#include "engine/draw/dot.hpp"
#include "engine/graph/edges.hpp"
#include "engine/plan/memory_plan.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/step/memory_requirement.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::ReduceWhen;
using sg::Shard;
using sg::testing::small_gpt2;

namespace {

constexpr sg::UpdatePlan stale(int steps) { return {.mode = sg::UpdateWhen::stale, .max_staleness = steps}; }

sg::StepGraph step_of(const sg::Plan& plan, const sg::StepOptions& options = {}, int seq = 8) {
  return sg::training_step(small_gpt2(), plan, {.global = plan.layout.dp * 2, .micro = 1, .seq = seq}, options);
}

std::vector<sg::Node> nodes_where(const sg::Graph& graph, const auto& wanted) {
  std::vector<sg::Node> found;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (wanted(sg::Node{i}, graph.labels({i}))) found.push_back({i});
  }
  return found;
}

// Nodes of the forward and backward passes, and of the late reduction.
std::vector<sg::Node> computing(const sg::Graph& graph) {
  return nodes_where(graph, [](sg::Node, const sg::Labels& labels) {
    return labels.phase == "forward" || labels.phase == "backward" || labels.phase == "weight";
  });
}
std::vector<sg::Node> reducing(const sg::Graph& graph) {
  return nodes_where(
      graph, [](sg::Node, const sg::Labels& labels) { return labels.phase == "reduce" && labels.microbatch < 0; });
}
std::vector<sg::Node> updating(const sg::Graph& graph) {
  return nodes_where(graph, [&](sg::Node node, const sg::Labels&) { return graph.op(node) == "adamw"; });
}

// On one rank: order inside a rank is derived inside that rank.
bool any_path(const sg::Graph& graph, const std::vector<sg::Node>& from, const std::vector<sg::Node>& to) {
  return std::ranges::any_of(from, [&](sg::Node a) {
    return std::ranges::any_of(to,
                               [&](sg::Node b) { return graph.rank(a) == graph.rank(b) && sg::reaches(graph, a, b); });
  });
}

}  // namespace

TEST_CASE("a staleness of 0 is the graph of a synchronous step", "[graphs][stale]") {
  const sg::StepGraph synchronous = step_of({.layout = {.dp = 2, .pp = 2}});
  const sg::StepGraph stale_0     = step_of({.layout = {.dp = 2, .pp = 2}, .update = stale(0)});
  std::ostringstream a, b;
  sg::write_dot(synchronous, a);
  sg::write_dot(stale_0, b);
  CHECK(a.str() == b.str());
}

TEST_CASE("the reduction of earlier gradients and the passes of a step do not wait for each other", "[graphs][stale]") {
  const int late       = GENERATE(1, 2);
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::grad_op, Shard::full, Shard::hybrid);
  const auto layout    = GENERATE(sg::LayoutSpec{.dp = 4}, sg::LayoutSpec{.dp = 2, .tp = 2},
                                  sg::LayoutSpec{.dp = 2, .tp = 2, .pp = 2, .sequence_parallel = true});
  static int seen      = 0;
  if (sg::testing::left_out(seen, 7)) return;
  CAPTURE(late, to_string(strategy), to_string(layout));
  const sg::StepGraph step = step_of({.layout = layout,
                                      .shard  = {.strategy   = strategy,
                                                 .min_params = strategy == Shard::none ? 0 : 50,
                                                 .group      = strategy == Shard::hybrid ? 2 : 0},
                                      .update = stale(late)});
  sg::verify(step);
  for (const auto order : {sg::IssueOrder::per_communicator, sg::IssueOrder::per_rank})
    sg::verify({step.graph, sg::plan_memory(step.graph, {.issue_order = order})});
  const auto passes = computing(step.graph), reductions = reducing(step.graph), updates = updating(step.graph);
  REQUIRE_FALSE(passes.empty());
  REQUIRE_FALSE(reductions.empty());
  REQUIRE_FALSE(updates.empty());
  CHECK_FALSE(any_path(step.graph, reductions, passes));
  CHECK_FALSE(any_path(step.graph, passes, reductions));
  CHECK_FALSE(any_path(step.graph, updates, reductions));
  // The update waits for the passes; for the reduction only if that is of the gradients that it applies.
  CHECK(any_path(step.graph, passes, updates));
  CHECK(any_path(step.graph, reductions, updates) == (late == 1));
}

TEST_CASE("a tight memory plan makes neither the late reduction nor the passes wait for the other",
          "[graphs][stale][memory]") {
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::full, Shard::hybrid);
  const auto travel    = GENERATE(sg::DType::f32, sg::DType::bf16);
  const bool views     = GENERATE(true, false);
  CAPTURE(to_string(strategy), travel, views);
  const sg::StepGraph step =
      step_of({.layout    = {.dp = 4},
               .shard     = {.strategy     = strategy,
                             .min_params   = strategy == Shard::none ? 0 : 50,
                             .group        = strategy == Shard::hybrid ? 2 : 0,
                             .bucket_views = views},
               .precision = {.param = travel == sg::DType::bf16 ? sg::DType::bf16 : sg::DType::f32, .reduce = travel},
               .update    = stale(1)},
              {}, /*seq=*/16);
  const sg::MemoryPlan plan = sg::plan_memory(step.graph);
  if (strategy == Shard::full) CHECK(plan.num_reuse_edges() > 0);
  const auto is_late = [&](sg::Node node) {
    const sg::Labels labels = step.graph.labels(node);
    return labels.phase == "reduce" && labels.microbatch < 0;
  };
  for (const sg::ReuseEdge& edge : plan.reuse_edges) {
    CAPTURE(step.graph.describe(edge.before), step.graph.describe(edge.after));
    CHECK_FALSE((!edge.loop && (is_late(edge.before) || is_late(edge.after))));
  }
}

TEST_CASE("gradients that are reduced after each microbatch are not reduced later", "[graphs][stale][shard]") {
  const sg::StepGraph step = step_of({.layout = {.dp = 2},
                                      .shard  = {.strategy = Shard::full, .reduce = ReduceWhen::each, .min_params = 0},
                                      .update = stale(1)});
  sg::verify(step);
  CHECK(std::ranges::none_of(reducing(step.graph), [&](sg::Node node) { return step.graph.has_part(node); }));
  const auto shifts = nodes_where(step.graph, [](sg::Node, const sg::Labels& l) { return l.phase == sg::shift_phase; });
  CHECK(any_path(step.graph, computing(step.graph), shifts));
}

TEST_CASE("a stale step has one more set of gradients for each step of delay", "[graphs][stale][memory]") {
  const Shard strategy = GENERATE(Shard::none, Shard::zero1, Shard::full);
  CAPTURE(to_string(strategy));
  const auto needs = [&](int late) {
    const sg::Plan plan{.layout = {.dp = 2},
                        .shard  = {.strategy = strategy, .min_params = strategy == Shard::none ? 0 : 50},
                        .update = stale(late)};
    return sg::memory_requirements(small_gpt2(), plan, {.global = 2, .micro = 1, .seq = 8}).front();
  };
  // At the end of the backward pass all gradients of the step are there, and all earlier sets.
  const auto bytes         = [&](int late) { return needs(late)[sg::MemoryRole::gradients]; };
  const std::int64_t whole = bytes(1) / 2, one = bytes(2) - bytes(1);
  CHECK(bytes(3) - bytes(2) == one);
  // Sharded sets that are reduced have the rank's own elements only.
  if (strategy == Shard::none) {
    CHECK(one > whole * 9 / 10);
    CHECK(one <= whole);
  } else {
    CHECK(one > whole * 4 / 10);
    CHECK(one < whole * 6 / 10);
  }
}

TEST_CASE("drawings of a stale step show how old gradients are", "[graphs][stale]") {
  const sg::StepGraph step = step_of({.layout = {.dp = 2}, .update = stale(3)});
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < step.graph.num_buffers(); ++i) names.insert(step.graph.spec(sg::Buffer{i}).name);
  for (const char* name :
       {"bucket 0, 1 step old", "bucket 0, 2 steps old", "bucket 0, 3 steps old", "clip factor, 3 steps old"}) {
    CAPTURE(name);
    CHECK(names.contains(name));
  }
  CHECK_FALSE(names.contains("bucket 0, 4 steps old"));
  std::ostringstream out;
  sg::write_dot(step, out, {.detail = sg::Detail::op, .rank = sg::Rank{0}});
  CHECK(out.str().find("2 steps old") != std::string::npos);
}

TEST_CASE("stale steps are planned and simulated, and a slow reduction is hidden", "[graphs][stale]") {
  // A link on which the reduction takes about as long as the passes.
  const auto time_of = [&](int late, double bytes_per_s) {
    const sg::StepGraph step = step_of({.layout = {.dp = 4}, .update = stale(late)});
    sg::verify({step.graph, sg::plan_memory(step.graph)});
    const sg::Machine machine = sg::two_level_machine(
        {.ranks          = 4,
         .ranks_per_node = 1,
         .between        = {.latency_s = 1e-6, .bytes_per_s = bytes_per_s},
         .rates          = {.compute = {.flops_per_s = 1e9, .bytes_per_s = 1e9}, .copy = {.bytes_per_s = 1e10}}});
    return sg::simulate(step.graph, machine).makespan_s;
  };
  const double compute = time_of(0, 1e15);
  double slow          = 1e9;
  while (time_of(0, slow) < 1.8 * compute) slow /= 2;
  const double synchronous = time_of(0, slow), one = time_of(1, slow);
  CAPTURE(compute, slow, synchronous, one);
  CHECK(one < 0.8 * synchronous);
}

TEST_CASE("what a stale update cannot be combined with is refused by name", "[graphs][stale][refuses]") {
  const auto refused = [](const sg::Plan& plan, const sg::StepOptions& options, const std::string& text) {
    CHECK_THROWS_MATCHES(step_of(plan, options), sg::Error, MessageMatches(ContainsSubstring(text)));
  };
  refused({.update = stale(1)}, {.keep_gradients = true}, "update.mode: stale with max_staleness 1 keeps no gradients");
  refused({.update = stale(1)}, {.update_first = true},
          "update.mode: stale with max_staleness 1 does not update first");
  refused({.offload = {.optimizer = true}, .update = stale(2)}, {},
          "update.mode: stale with max_staleness 2 and offload.optimizer with overlap");
  refused({.offload = {.grads = true}, .update = stale(1)}, {}, "offload.grads moves them (offload.grads false)");
  refused({.offload = {.strategy = sg::OffloadStrategy::extreme, .device_bytes = 1 << 20}, .update = stale(1)}, {},
          "offload.strategy extreme may move them");
  // The same with a staleness of 0 is a synchronous step.
  CHECK_NOTHROW(step_of({.offload = {.optimizer = true}, .update = stale(0)}, {.keep_gradients = true}));
}
