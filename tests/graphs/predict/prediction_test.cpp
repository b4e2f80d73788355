#include "graphs/predict/prediction.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <string_view>

#include "backends/loopback/world.hpp"
#include "engine/simulate/simulate.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/train/trainer.hpp"
#include "tests/support/graphs/rebuild.hpp"

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

TEST_CASE("a prediction of balanced stages has the stages of the run", "[graphs][prediction]") {
  // On the calibrated machine other ops than products take no time: a split for it would not be that of the run.
  const sg::Model model = sg::gpt2({.layers = 6, .width = 16, .heads = 2, .context = 8, .vocab = 256});
  const sg::Plan plan{.layout = {.pp = 2}, .pipeline = {.balanced = true}};
  const sg::Calibration calibration{.threads = 2, .ops = {{"linear", {{1e6, 1e4, 2e-3, 1e-3}}}}};
  const sg::StepPrediction found = sg::predict_step(model, plan, batch, calibration);
  sg::LoopbackWorld world(2);
  sg::Trainer trainer(model, plan, batch, world, {.threads = 1});
  CHECK(found.step.layers == trainer.run().step().layers);
  CHECK(found.step.graph == trainer.run().step().graph);
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

TEST_CASE("a run with a device for each rank has the bubble that the schedule predicts", "[graphs][prediction]") {
  // Nodes of the step take the time of their flops. Nothing is measured, so the figures are the same everywhere.
  const sg::Model model = sg::gpt2({.layers = 8, .width = 32, .heads = 2, .context = 16, .vocab = 32, .tied = false});
  const sg::BatchSpec eight{.global = 8, .micro = 1, .seq = 16};
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"}) {
    CAPTURE(schedule);
    const sg::StepGraph step =
        sg::training_step(model, {.layout = {.pp = 4}, .pipeline = {.schedule = schedule}}, eight);
    sg::Machine devices(4);
    devices.rate(sg::NodeKind::compute, {.flops_per_s = 1e9});
    const sg::Timeline timeline = sg::simulate(step.graph, devices);
    const double measured = sg::measured_bubble(step, timeline), predicted = sg::pipeline_bubble(step, timeline);
    CHECK(measured <= predicted + 0.02);  // a B sends its input's gradient before its last weight gradient
    CHECK(measured >= predicted - 0.1);
    // With I and W apart, an action is as indivisible as the simulation of the schedule takes it.
    if (std::string_view(schedule).starts_with("zb") || std::string_view(schedule).starts_with("v-"))
      CHECK_THAT(measured, Catch::Matchers::WithinAbs(predicted, 0.02));
  }
}

TEST_CASE("the bubble of a recorded run is a share of its time", "[graphs][prediction]") {
  const sg::Plan plan{.layout = {.pp = 2}};
  sg::LoopbackWorld world(2);
  sg::Trainer trainer(sg::gpt2(small), plan, batch, world, {.threads = 2});
  sg::Recorder recorder;
  static_cast<void>(trainer.step(std::vector<std::int32_t>(4 * 8 + 1, 3), &recorder));
  const double bubble = sg::measured_bubble(trainer.run().step(), recorder.timeline());
  CHECK(bubble >= 0);
  CHECK(bubble < 1);
}
