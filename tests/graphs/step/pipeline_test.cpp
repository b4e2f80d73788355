#include "graphs/step/pipeline.hpp"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <numeric>
#include <random>

#include "engine/base/error.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/step/memory_requirement.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/short_training.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

double work_of(const sg::Costs& costs) { return costs.F + costs.I + costs.W; }

double slowest(const std::vector<sg::Costs>& layers, const std::vector<int>& split) {
  double most      = 0;
  std::size_t next = 0;
  for (const int count : split) {
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += work_of(layers[next++]);
    most = std::max(most, sum);
  }
  return most;
}

// The least maximum over all splits, by trying each.
double best_of_all(const std::vector<sg::Costs>& layers, int num_stages) {
  double best = 1e300;
  std::vector<int> split;
  const auto place = [&](const auto& self, int left) -> void {
    const int stages = num_stages - static_cast<int>(split.size());
    if (stages == 1) {
      split.push_back(left);
      best = std::min(best, slowest(layers, split));
      split.pop_back();
      return;
    }
    for (int take = 1; take <= left - (stages - 1); ++take) {
      split.push_back(take);
      self(self, left - take);
      split.pop_back();
    }
  };
  place(place, static_cast<int>(layers.size()));
  return best;
}

constexpr sg::BatchSpec batch_of_8{.global = 8, .micro = 1, .seq = 16};

}  // namespace

TEST_CASE("a balanced split has the least maximum of all splits", "[graphs][step][pipeline]") {
  std::mt19937_64 random(24);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 300; ++i) {
    std::vector<sg::Costs> layers(static_cast<std::size_t>(draw(1, 11)));
    for (sg::Costs& layer : layers) layer = {draw(1, 9) / 4.0, draw(0, 9) / 4.0, draw(0, 30) / 4.0, 0};
    const int stages = draw(1, static_cast<int>(layers.size()));
    CAPTURE(i, stages, layers.size());
    const std::vector<int> split = sg::balanced_split(layers, stages);
    REQUIRE(std::ssize(split) == stages);
    REQUIRE(*std::min_element(split.begin(), split.end()) >= 1);
    REQUIRE(std::accumulate(split.begin(), split.end(), 0) == std::ssize(layers));
    REQUIRE(slowest(layers, split) == best_of_all(layers, stages));
  }
  // Of several splits with the least maximum, the most even one.
  CHECK(sg::balanced_split({{6, 0, 0}, {1, 0, 0}, {1, 0, 0}, {1, 0, 0}, {1, 0, 0}}, 3) == std::vector{1, 2, 2});
  CHECK_THROWS_MATCHES(sg::balanced_split(std::vector<sg::Costs>(2), 3), sg::Error,
                       MessageMatches(ContainsSubstring("2 layers and 3 stages")));
}

TEST_CASE("embedding, head and loss count with the first and the last layer", "[graphs][step][pipeline]") {
  const auto model  = sg::gpt2({.layers = 6, .width = 32, .heads = 4, .context = 16, .vocab = 1024, .tied = false});
  const auto layers = sg::layer_costs(model, {}, batch_of_8);
  REQUIRE(layers.size() == 6);
  for (const std::size_t layer : {1U, 2U, 3U, 4U}) {
    CHECK(layers[layer] == layers[1]);
    // Products of matrices: two of the size of the forward pass in the backward pass.
    CHECK(layers[layer].I == Approx(layers[layer].F).epsilon(0.3));
    CHECK(layers[layer].W == Approx(layers[layer].F).epsilon(0.3));
  }
  CHECK(work_of(layers[0]) >= work_of(layers[1]));
  const double head = 2.0 * 16 * 32 * 1024;  // flops of one product of the head
  CHECK(layers[5].F - layers[1].F > head);
  CHECK(layers[5].W - layers[1].W >= head);
  // The costs of stages are sums. A stage of the whole model does all work.
  const auto whole = sg::stage_costs(model, {}, batch_of_8);
  REQUIRE(whole.size() == 1);
  CHECK(work_of(whole[0]) == Approx(std::accumulate(layers.begin(), layers.end(), 0.0,
                                                    [](double sum, const auto& of) { return sum + work_of(of); })));
  const auto two = sg::stage_costs(model, {.layout = {.pp = 2}, .pipeline = {.split = {5, 1}}}, batch_of_8);
  REQUIRE(two.size() == 2);
  CHECK(work_of(two[1]) == Approx(work_of(layers[5])));
  CHECK(sg::stage_costs(model, {.layout = {.pp = 3}, .pipeline = {.schedule = "zb-v"}}, batch_of_8).size() == 6);
}

TEST_CASE("a calibrated machine gives costs in seconds", "[graphs][step][pipeline]") {
  const auto model = sg::testing::small_gpt2();
  sg::Machine machine(2);
  machine.rate(sg::NodeKind::compute, {.flops_per_s = 1e9});
  machine.rate(sg::NodeKind::communicate, {.bytes_per_s = 1e9, .overhead_s = 1e-3});
  const sg::Plan plan{.layout = {.pp = 2}};
  const auto flops   = sg::stage_costs(model, plan, batch_of_8),
             seconds = sg::stage_costs(model, plan, batch_of_8, &machine);
  REQUIRE(seconds.size() == 2);
  for (const std::size_t stage : {0U, 1U}) {
    CHECK(seconds[stage].F == Approx(flops[stage].F / 1e9));
    CHECK(seconds[stage].I == Approx(flops[stage].I / 1e9));
    CHECK(seconds[stage].W == Approx(flops[stage].W / 1e9));
    CHECK(flops[stage].COMM == 0);
    CHECK(seconds[stage].COMM >= 1e-3);
  }
  const auto network = sg::two_level_machine({.ranks          = 2,
                                              .ranks_per_node = 1,
                                              .inside         = {.latency_s = 1, .bytes_per_s = 1e12},
                                              .between        = {.latency_s = 3, .bytes_per_s = 1e3}});
  const double bytes = 16.0 * static_cast<double>(model.width) * 4;
  CHECK(sg::stage_costs(model, plan, batch_of_8, &network)[0].COMM == Approx(3 + bytes / 1e3));
}

TEST_CASE("costs of layers follow sequence parallelism", "[graphs][step][pipeline]") {
  const auto model = sg::testing::small_llama();
  sg::Plan plan{.layout = {.tp = 2, .pp = 2}};
  const auto network            = sg::two_level_machine({.ranks          = 4,
                                                         .ranks_per_node = 2,
                                                         .inside         = {.latency_s = 0, .bytes_per_s = 1e12},
                                                         .between        = {.latency_s = 0, .bytes_per_s = 1e3}});
  const auto whole              = sg::layer_costs(model, plan, batch_of_8);
  const double transfer         = sg::layer_costs(model, plan, batch_of_8, &network)[0].COMM;
  plan.layout.sequence_parallel = true;
  const auto divided            = sg::layer_costs(model, plan, batch_of_8);
  for (std::size_t layer = 0; layer < whole.size(); ++layer) {
    // Norms and residuals are computed for half of the tokens.
    CHECK(divided[layer].F < whole[layer].F);
    CHECK(divided[layer].F > 0.5 * whole[layer].F);
  }
  CHECK(sg::layer_costs(model, plan, batch_of_8, &network)[0].COMM == Approx(transfer / 2));
  // A prompt with an odd number of tokens is not divided.
  CHECK(sg::layer_costs(model, plan, {.global = 1, .micro = 1, .seq = 15}).size() == whole.size());
}

TEST_CASE("balanced stages train to the same bits, and the slowest is faster", "[graphs][step][pipeline]") {
  // The head is worth more than a layer, so the last stage gets fewer of them.
  const auto model     = sg::gpt2({.layers = 8, .width = 16, .heads = 4, .context = 16, .vocab = 512});
  const int steps      = sg::testing::cases(5);
  const auto reference = sg::testing::train(model, {}, batch_of_8, steps);
  for (const char* const schedule : {"1f1b", "zb-v"}) {
    if (sg::testing::sanitized() && std::string_view(schedule) == "1f1b") continue;
    CAPTURE(schedule);
    sg::Plan plan{.layout = {.pp = 2}, .pipeline = {.schedule = schedule}};
    const auto even_costs  = sg::stage_costs(model, plan, batch_of_8);
    plan.pipeline.balanced = true;
    const auto costs       = sg::stage_costs(model, plan, batch_of_8);
    const auto most        = [](const std::vector<sg::Costs>& of) {
      return work_of(*std::max_element(of.begin(), of.end(),
                                              [](const auto& a, const auto& b) { return work_of(a) < work_of(b); }));
    };
    CHECK(most(costs) < most(even_costs));
    const sg::Plan split = sg::with_split(model, plan, batch_of_8);
    CHECK_FALSE(split.pipeline.balanced);
    CHECK(split.pipeline.split.back() < 8 / std::ssize(split.pipeline.split));
    CHECK(sg::with_split(model, split, batch_of_8) == split);
    CHECK(sg::testing::train(model, plan, batch_of_8, steps) == reference);
    CHECK(sg::memory_requirements(model, plan, batch_of_8).size() ==
          sg::memory_requirements(model, split, batch_of_8).size());
  }
}

TEST_CASE("V schedules train to the same bits with sharding, recomputation and fewer microbatches than ranks",
          "[graphs][step][pipeline]") {
  const auto model = GENERATE(false, true) ? sg::testing::small_gpt2() : sg::testing::small_llama();
  const int micro  = GENERATE(1, 4);  // 4 and 1 microbatches of each data-parallel rank
  const int steps  = sg::testing::cases(5);
  static int seen  = 0;
  if (sg::testing::left_out(seen, 3)) return;
  const sg::BatchSpec batch{.global = 8, .micro = micro, .seq = 16};
  const auto reference = sg::testing::train(model, {.layout = {.dp = 2}}, batch, steps);
  for (const char* schedule : {"zb-v", "v-half", "v-min", "dualpipe-v"}) {
    CAPTURE(model.kind, micro, schedule);
    sg::Plan plan{.layout = {.dp = 2, .pp = 2}, .pipeline = {.schedule = schedule}};
    if (!sg::testing::sanitized()) CHECK(sg::testing::train(model, plan, batch, steps) == reference);
    plan.shard     = {.strategy = sg::Shard::full, .min_params = 1, .keep_between_microbatches = true};
    plan.recompute = sg::Recompute::full;
    CHECK(sg::testing::train(model, plan, batch, steps) == reference);
  }
}

TEST_CASE("a searched schedule trains to the same bits, within its limit, and evaluates with the same stages",
          "[graphs][step][pipeline]") {
  const auto model     = sg::testing::small_gpt2();
  const int steps      = sg::testing::cases(5);
  const auto reference = sg::testing::train(model, {}, batch_of_8, steps);
  for (const int chunks : {1, 2}) {
    CAPTURE(chunks);
    sg::Plan plan{.layout = {.pp = 2}, .pipeline = {.schedule = "auto", .chunks = chunks, .limit = 2}};
    const sg::Plan with = sg::with_split(model, plan, batch_of_8);
    REQUIRE(with.pipeline.found);
    const sg::PipelineSchedule& found = *with.pipeline.found;
    CHECK(found.num_stages() == 2 * chunks);
    if (!sg::testing::sanitized() || chunks == 1)  // searches take long
      CHECK(found == *sg::with_split(model, plan, batch_of_8).pipeline.found);
    for (const double peak : sg::peak_activations(found)) CHECK(peak <= 2);
    const auto costs = sg::stage_costs(model, plan, batch_of_8);
    const auto fixed =
        sg::pipeline_schedule(sg::ScheduleKind::one_f_one_b, {.ranks = 2, .microbatches = found.num_microbatches});
    if (chunks == 1)
      CHECK(sg::simulate(found, {.costs = costs}).bubble_rate <= sg::simulate(fixed, {.costs = costs}).bubble_rate);
    CHECK(sg::testing::train(model, plan, batch_of_8, steps) == reference);
    CHECK(sg::placement_of_stages(with.pipeline, 2) == found.rank_of_stage);
    if (sg::testing::sanitized() && chunks == 2) continue;  // searches take long
    plan.pipeline.balanced = true;
    CHECK(sg::testing::train(model, plan, batch_of_8, steps) == reference);
  }
  sg::Plan none{.layout = {.pp = 2}, .pipeline = {.schedule = "auto"}};
  CHECK_THROWS_MATCHES(sg::schedule_of(none.pipeline, 2, 8), sg::Error,
                       MessageMatches(ContainsSubstring("auto has not been searched for")));
}
