// The graph of an asynchronous window: what waits for what, whose buffers are where, and what is refused.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <sstream>
#include <string>

#include "backends/loopback/world.hpp"
#include "engine/base/error.hpp"
#include "engine/draw/dot.hpp"
#include "engine/graph/edges.hpp"
#include "engine/graph/matching.hpp"
#include "engine/run/runnable_graph.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/step/asynchronous.hpp"
#include "graphs/step/memory_requirement.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::testing::small_gpt2;
using sg::testing::small_llama;

namespace {

sg::Plan plan_of(int dp, int bound) {
  return {.layout = {.dp = dp}, .update = {.mode = sg::UpdateWhen::asynchronous, .max_staleness = bound}};
}
sg::BatchSpec batch_of(int dp, int microbatches = 1) { return {.global = dp * microbatches, .micro = 1, .seq = 8}; }

// All nodes that must have ended before a node starts, over all ranks: matched parts run together.
class Before {
 public:
  explicit Before(const sg::Graph& graph) : graph_(graph), edges_(graph.edges()), matching_(sg::match_parts(graph)) {}

  [[nodiscard]] bool reaches(std::uint32_t from, std::uint32_t to) const {
    std::vector<bool> seen(graph_.num_nodes(), false);
    std::vector<std::uint32_t> left{to};
    while (!left.empty()) {
      const std::uint32_t node = left.back();
      left.pop_back();
      if (node == from) return true;
      if (seen[node]) continue;
      seen[node]         = true;
      const auto meeting = matching_.of_node[node];
      if (meeting != sg::Matching::none) {
        for (const std::uint32_t part : matching_.meeting(meeting)) {
          if (!seen[part]) left.push_back(part);
        }
      }
      for (const std::uint32_t before : edges_.before(sg::Node{node})) left.push_back(before);
    }
    return false;
  }

 private:
  const sg::Graph& graph_;
  const sg::Edges& edges_;
  sg::Matching matching_;
};

// The nodes of an op, by rank and in the order of steps.
std::map<int, std::vector<std::uint32_t>> nodes_of(const sg::Graph& graph, std::string_view op) {
  std::map<int, std::vector<std::uint32_t>> found;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    if (graph.op(sg::Node{i}) == op) found[index(graph.rank(sg::Node{i}))].push_back(i);
  }
  return found;
}

}  // namespace

TEST_CASE("an asynchronous window is proved, with its memory, for any ranks, bound and length",
          "[graphs][asynchronous]") {
  const int dp = GENERATE(1, 2, 3), bound = GENERATE(0, 1, 3), steps = GENERATE(1, 2, 6);
  static int seen = 0;
  if (sg::testing::left_out(seen, 5)) return;
  CAPTURE(dp, bound, steps);
  const sg::Model model = dp == 2 ? small_llama(0.1) : small_gpt2();
  sg::Plan plan         = plan_of(dp, bound);
  plan.recompute        = steps == 2 ? sg::Recompute::full : sg::Recompute::none;
  if (bound == 3) plan.precision.param = sg::DType::f16;
  const sg::StepGraph window = sg::asynchronous_window(model, plan, batch_of(dp, 2), steps);
  CHECK(sg::find_flaws(window).empty());
  const sg::LoopbackWorld world(dp);
  CHECK_NOTHROW(sg::verify(sg::RunnableGraph(window.graph, world, {.reuse = sg::Reuse::tight})));
  CHECK(window.window.size() == static_cast<std::size_t>(steps));
  CHECK(nodes_of(window.graph, "give_gradient").size() == static_cast<std::size_t>(dp));
  CHECK(nodes_of(window.graph, "give_gradient")[0].size() == static_cast<std::size_t>(steps));
}

TEST_CASE("a rank's step waits for the steps of other ranks that the bound names, and for no later ones",
          "[graphs][asynchronous]") {
  const int bound = GENERATE(0, 1, 2), dp = 3, steps = 5;
  CAPTURE(bound);
  const sg::StepGraph window = sg::asynchronous_window(small_gpt2(), plan_of(dp, bound), batch_of(dp), steps);
  const Before before(window.graph);
  auto takes = nodes_of(window.graph, "take_version"), gives = nodes_of(window.graph, "give_gradient");
  for (int rank = 0; rank < dp; ++rank) {
    for (int other = 0; other < dp; ++other) {
      for (int step = 0; step < steps; ++step) {
        for (int earlier = 0; earlier < steps; ++earlier) {
          CAPTURE(rank, other, step, earlier);
          const bool waits = earlier <= (rank == other ? step - 1 : step - 1 - bound);
          CHECK(before.reaches(gives[other][static_cast<std::size_t>(earlier)],
                               takes[rank][static_cast<std::size_t>(step)]) == waits);
        }
      }
    }
    CHECK(takes[rank].size() == static_cast<std::size_t>(steps) + 1);  // the last one is of the window's end
  }
}

TEST_CASE("nothing of a rank follows its part of another rank's gate", "[graphs][asynchronous]") {
  const sg::StepGraph window = sg::asynchronous_window(small_gpt2(), plan_of(4, 1), batch_of(4), 5);
  const sg::Graph& graph     = window.graph;
  int marks                  = 0;
  for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) {
    for (const std::uint32_t before : graph.edges().before(sg::Node{i}))
      CHECK_FALSE(graph.name(sg::Node{before}).starts_with("mark"));
    marks += graph.name(sg::Node{i}).starts_with("mark");
  }
  CHECK(marks == 3 * 4 * 3);  // gates before steps 2, 3 and 4; four receivers; three other ranks
}

TEST_CASE("each version of a weight and each optimizer state is on one rank, and the ranks share them",
          "[graphs][asynchronous][memory]") {
  const int dp               = GENERATE(1, 2, 4);
  const sg::Model model      = small_gpt2();
  const sg::StepGraph window = sg::asynchronous_window(model, plan_of(dp, 1), batch_of(dp), 2);
  const sg::StepGraph one    = sg::training_step(model, {}, batch_of(1));
  std::map<std::string, int> versions, means;
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(dp));
  for (std::uint32_t i = 0; i < window.graph.num_buffers(); ++i) {
    const sg::BufferSpec& spec = window.graph.spec(sg::Buffer{i});
    if (spec.name.starts_with("version ") && spec.name.find(" of ") != std::string::npos) {
      ++versions[spec.name.substr(spec.name.find(" of ") + 4)];
      bytes[static_cast<std::size_t>(index(spec.rank))] += spec.size_bytes;
    }
    if (spec.name.starts_with("mean of ")) ++means[spec.name.substr(8)];
  }
  std::size_t updated = 0;
  for (const sg::StepWeight& weight : one.ranks.front().weights) updated += !weight.first.empty();
  CHECK(versions.size() == updated);
  CHECK(means.size() == updated);
  for (const auto& [name, count] : versions) CHECK(count == dp + 1);
  for (const auto& [name, count] : means) CHECK(count == 1);
  CHECK(*std::ranges::max_element(bytes) < 2 * *std::ranges::min_element(bytes));
  // All of this is in the memory plan: no rank needs less than its weights, versions and states.
  const auto needs        = sg::memory_requirements(model, plan_of(dp, 1), batch_of(dp));
  std::int64_t parameters = 0, optimizer = 0;
  for (const sg::MemoryRequirement& each : needs) {
    parameters += each[sg::MemoryRole::parameters] * static_cast<std::int64_t>(each.ranks.size());
    optimizer += each[sg::MemoryRole::optimizer] * static_cast<std::int64_t>(each.ranks.size());
  }
  const sg::MemoryRequirement alone = sg::memory_requirement(one, sg::Rank{0});
  CHECK(parameters == alone[sg::MemoryRole::parameters] * (2 * dp + 1));
  CHECK(optimizer == alone[sg::MemoryRole::optimizer]);
}

TEST_CASE("a slice of an asynchronous window is built alone", "[graphs][asynchronous]") {
  const sg::StepGraph window = sg::asynchronous_window(small_gpt2(0.1), plan_of(3, 1), batch_of(3), 4);
  for (const int rank : {0, 2}) {
    const sg::StepGraph one =
        sg::asynchronous_window(small_gpt2(0.1), plan_of(3, 1), batch_of(3), 4, {.only = sg::Rank{rank}});
    CHECK(one.graph.num_nodes() == sg::slice(window.graph, sg::Rank{rank}).num_nodes());
    CHECK(one.graph == sg::slice(window.graph, sg::Rank{rank}));
  }
}

TEST_CASE("a drawing of an asynchronous window shows versions and gates", "[graphs][asynchronous][draw]") {
  const sg::StepGraph window = sg::asynchronous_window(small_gpt2(), plan_of(2, 0), batch_of(2), 2);
  std::ostringstream by_op, by_stage;
  sg::write_dot(window, by_op, {.detail = sg::Detail::op});
  for (const char* text : {"open versions", "take newest version s1", "give gradient, make next version s0", "gate s1",
                           "mark s0 for rank 1", "take last version", "close versions"})
    CHECK_THAT(by_op.str(), ContainsSubstring(text));
  sg::write_dot(window, by_stage);
  for (const char* text : {"take", "give", "gate"}) CHECK_THAT(by_stage.str(), ContainsSubstring(text));
}

TEST_CASE("a window of one step has the nodes of one rank's step, without updates", "[graphs][asynchronous]") {
  const sg::StepGraph window = sg::training_step(small_gpt2(), plan_of(1, 0), batch_of(1, 2));
  const sg::StepGraph one    = sg::training_step(small_gpt2(), {}, batch_of(1, 2));
  const auto count           = [](const sg::Graph& graph, std::string_view phase) {
    int found = 0;
    for (std::uint32_t i = 0; i < graph.num_nodes(); ++i) found += graph.labels(sg::Node{i}).phase == phase;
    return found;
  };
  for (const char* phase : {"forward", "backward", "norm", "clip", "loss"}) {
    CAPTURE(phase);
    CHECK(count(window.graph, phase) == count(one.graph, phase));
  }
  CHECK(count(window.graph, sg::update_phase) == 0);
  CHECK(count(window.graph, "gate") == 0);
}

TEST_CASE("an asynchronous window says its update and its layers", "[graphs][asynchronous]") {
  const sg::StepGraph window = sg::asynchronous_window(small_gpt2(), plan_of(2, 3), batch_of(2), 2);
  CHECK(window.update == plan_of(2, 3).update);
  CHECK(window.layers == sg::training_step(small_gpt2(), {}, batch_of(1)).layers);
  CHECK(window.layers.size() == 1);
}

TEST_CASE("an asynchronous window refuses what it cannot be combined with", "[graphs][asynchronous][refuses]") {
  const auto refusal = [](const auto& change, const sg::StepOptions& options = {}) {
    sg::Plan plan = plan_of(2, 1);
    change(plan);
    try {
      static_cast<void>(sg::asynchronous_window(small_gpt2(), plan, batch_of(2), 2, options));
    } catch (const sg::Error& error) {
      CHECK(error.kind() == sg::ErrorKind::config);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const auto same = [](sg::Plan&) {};
  CHECK(refusal(same) == "accepted");
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.layout.tp = 2; }),
             ContainsSubstring("layout.tp: 2 with update.mode asynchronous"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.layout.pp = 2; }),
             ContainsSubstring("layout.pp: 2 with update.mode asynchronous"));
  for (const sg::Shard strategy : {sg::Shard::zero1, sg::Shard::grad_op, sg::Shard::full}) {
    CHECK_THAT(refusal([&](sg::Plan& plan) { plan.shard.strategy = strategy; }),
               ContainsSubstring("shard.strategy: ") && ContainsSubstring("asynchronous"));
  }
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.shard.reduction = sg::Reduction::sum; }),
             ContainsSubstring("shard.reduction: sum with update.mode asynchronous"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.offload.optimizer = true; }),
             ContainsSubstring("offload.optimizer: true with update.mode asynchronous"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.offload.strategy = sg::OffloadStrategy::balanced; }),
             ContainsSubstring("offload.strategy: balanced with update.mode asynchronous"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.recompute = sg::Recompute::automatic; }),
             ContainsSubstring("recompute: auto with update.mode asynchronous"));
  // Settings of a reduction have no effect.
  const auto no_reduction = [](const std::string& key) {
    return ContainsSubstring(key + " with update.mode asynchronous: gradients of ranks are never reduced (");
  };
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.algorithm = sg::Algorithm::ring; }),
             no_reduction("comm.algorithm: ring"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.algorithm = sg::Algorithm::adaptive; }),
             no_reduction("comm.algorithm: adaptive"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.shard.bucket_mb = 1; }), no_reduction("shard.bucket_mb: 1"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.shard.first_bucket_mb = 2; }), no_reduction("shard.first_bucket_mb: 2"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.shard.bucket_views = false; }),
             no_reduction("shard.bucket_views: false"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.shard.delay_all_reduce = true; }),
             no_reduction("shard.delay_all_reduce: true"));
  CHECK_THAT(refusal([](sg::Plan& plan) { plan.precision.reduce = sg::DType::bf16; }),
             no_reduction("precision.reduce: bf16"));
  CHECK(refusal([](sg::Plan& plan) { plan.precision.reduce = sg::DType::f32; }) == "accepted");
  CHECK_THAT(refusal(same, {.keep_gradients = true}),
             ContainsSubstring("update.mode: asynchronous: there is no gradient"));
  CHECK_THAT(refusal(same, {.update_first = true}), ContainsSubstring("update.mode: asynchronous"));
  CHECK_THROWS_MATCHES(sg::asynchronous_window(small_gpt2(), plan_of(2, 1), batch_of(2), 0), sg::Error,
                       MessageMatches(ContainsSubstring("StepOptions::window: 0 steps (1 to 4096)")));
  CHECK_THROWS_MATCHES(sg::asynchronous_window(small_gpt2(), {}, batch_of(2), 1), sg::Error,
                       MessageMatches(ContainsSubstring("update.mode: synchronous has no window (asynchronous)")));
}
