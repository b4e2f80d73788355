#include "graphs/predict/prediction.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>

#include "backends/loopback/world.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/rebuild.hpp"

namespace sg = stepgraph;
using Catch::Matchers::WithinRel;

namespace {

const sg::Gpt2Spec small{.layers = 2, .width = 16, .heads = 2, .context = 8, .vocab = 32};
const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 8};

}  // namespace

TEST_CASE("a prediction uses the graph, the memory plan and the edges that a trainer runs", "[graphs][prediction]") {
  const sg::Plan plan{.layout = {.dp = 2, .pp = 2}};
  const sg::Calibration calibration{.threads = 2, .ops = {{"linear", {{1e6, 1e4, 2e-3, 1e-3}}}}};
  const sg::StepPrediction found = sg::predict_step(sg::gpt2(small), plan, batch, calibration);
  sg::LoopbackWorld world(4);
  sg::Trainer trainer(sg::gpt2(small), plan, batch, world, {.threads = 1});
  CHECK(found.step.graph == trainer.run().step().graph);
  CHECK(found.plan.edges == trainer.run().plan().edges);
  CHECK(found.plan.offsets == trainer.run().plan().offsets);
  CHECK(found.peak_bytes() == trainer.run().plan().arena(sg::Rank{0}).size_bytes);
  CHECK(found.makespan_s() == found.timeline.makespan_s);
  CHECK_THAT(found.tokens_per_s * found.makespan_s(), WithinRel(32.0, 1e-12));
  CHECK(std::count(found.unmeasured.begin(), found.unmeasured.end(), "adamw") == 1);
  CHECK(std::count(found.unmeasured.begin(), found.unmeasured.end(), "linear") == 0);
}

TEST_CASE("if all ops take twice as long, so does the step", "[graphs][prediction]") {
  sg::Calibration calibration{.threads = 2, .ops = {{"linear", {{1e6, 1e4, 2e-3, 1e-3}}}}};
  const sg::Model model = sg::gpt2(small);
  const double once     = sg::predict_step(model, {}, batch, calibration).makespan_s();
  for (sg::RatePoint& point : calibration.ops.at("linear")) {
    point.busy_s *= 2;
    point.alone_s *= 2;
  }
  CHECK_THAT(sg::predict_step(model, {}, batch, calibration).makespan_s(), WithinRel(2 * once, 1e-9));
}

TEST_CASE("recomputation counts as part of the input gradients", "[graphs][prediction]") {
  sg::StepGraph step =
      sg::training_step(sg::gpt2(small), {.layout = {.pp = 2}, .pipeline = {.schedule = "zb-h1"}}, batch);
  sg::Timeline timeline{.nodes = std::vector<sg::NodeTime>(step.graph.num_nodes(), sg::NodeTime{0, 1, 0})};
  const auto before = sg::stage_costs(step, timeline);
  REQUIRE(before.size() == 2);
  for (const sg::Costs& stage : before) {
    CHECK(stage.F > 0);
    CHECK(stage.I > 0);
    CHECK(stage.W > 0);
  }
  // Labels the forward nodes as recomputation.
  step.graph       = sg::testing::rebuild(step.graph, [](sg::Node, sg::NodeSpec& spec) {
    if (spec.labels.phase == "forward") spec.labels.phase = "recompute";
  });
  const auto after = sg::stage_costs(step, timeline);
  for (std::size_t stage = 0; stage < 2; ++stage) {
    CHECK(after[stage].F == 0);
    CHECK_THAT(after[stage].I, WithinRel(before[stage].I + before[stage].F, 1e-9));
    CHECK(after[stage].W == before[stage].W);
  }
}
