#include "graphs/step/searched_schedule.hpp"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <map>
#include <tuple>

#include "engine/base/error.hpp"
#include "graphs/models/gpt2.hpp"
#include "graphs/models/llama.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/step/memory_requirement.hpp"
#include "graphs/step/pipeline.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using sg::MemoryRole;

namespace {

// Of the rank that needs most.
std::int64_t most_activations(const sg::Model& model, const sg::Plan& plan, const sg::BatchSpec& batch) {
  std::int64_t most = 0;
  for (const auto& need : sg::memory_requirements(model, plan, batch))
    most = std::max(most, need[MemoryRole::activations]);
  return most;
}

// Activations are most of its memory: a long sequence, a narrow model, a small vocabulary. A head of 32 elements is
// padded on no processor.
const sg::Model& narrow_model() {
  static const sg::Model model =
      sg::llama({.layers = 8, .width = 32, .heads = 1, .context = 64, .vocab = 16, .inner = 64});
  return model;
}
constexpr sg::BatchSpec batch_of_16{.global = 16, .micro = 1, .seq = 64};

}  // namespace

TEST_CASE("a limit in bytes is as many microbatches as the memory plan can hold", "[graphs][step][pipeline]") {
  sg::Plan plan{.layout = {.pp = 4}, .pipeline = {.schedule = "gpipe", .limit = 2.5}};
  CHECK(sg::activation_limit(narrow_model(), plan, batch_of_16) == 2.5);
  plan.pipeline.limit = 0;
  CHECK(sg::activation_limit(narrow_model(), plan, batch_of_16) == 0);
  const auto limit_of = [&](const char* kind) {  // with the bytes of the kind
    plan.pipeline.schedule    = kind;
    plan.pipeline.limit_bytes = sg::planned_activations(narrow_model(), plan, batch_of_16).bytes;
    return sg::activation_limit(narrow_model(), plan, batch_of_16);
  };
  // Microbatches of these kinds wait for W on the last rank, as the estimate has it.
  CHECK(limit_of("zb-h1") == Approx(4).epsilon(0.01));
  if (!sg::testing::sanitized()) CHECK(limit_of("zb-h2") == Approx(7).epsilon(0.01));
  // Those of other kinds take less. So the estimate promises no more than there is room for, and not much less.
  for (const auto& [kind, units] : {std::pair{"gpipe", 16.0}, {"1f1b", 4.0}, {"zb-v", 4.0}, {"v-half", 3.0}}) {
    if (sg::testing::sanitized()) break;  // planning takes long
    CAPTURE(kind);
    const double limit = limit_of(kind);
    CHECK(limit <= units);
    CHECK(limit >= 0.65 * units);
  }
  plan.pipeline.limit_bytes = 100;
  CHECK(sg::activation_limit(narrow_model(), plan, batch_of_16) == 1);
}

TEST_CASE("a limit in bytes is refused only if no order keeps it, and the bytes in the message are enough",
          "[graphs][step][pipeline]") {
  const auto model = sg::gpt2({.layers = 4, .width = 32, .heads = 4, .context = 32, .vocab = 256});
  const sg::BatchSpec batch{.global = 4, .micro = 1, .seq = 32};
  for (const int chunks : {1, 2}) {
    if (sg::testing::sanitized() && chunks == 2) continue;  // searches take long
    CAPTURE(chunks);
    sg::Plan plan{.layout = {.pp = 2}, .pipeline = {.schedule = "round-robin", .chunks = chunks}};
    const std::int64_t least = sg::planned_activations(model, plan, batch).bytes;
    plan.pipeline            = {.schedule = "auto", .chunks = chunks, .limit_bytes = least};
    const auto with          = sg::with_split(model, plan, batch);
    CHECK(sg::planned_activations(model, with, batch).bytes <= least);
    plan.pipeline.limit_bytes = 1000;
    std::string why;
    try {
      static_cast<void>(sg::with_split(model, plan, batch));
    } catch (const sg::Error& error) {
      why = error.what();
    }
    CHECK_THAT(why, ContainsSubstring("pipeline.limit: 1000 bytes, but the activations of ") &&
                        ContainsSubstring("(as many or more)"));
    const std::string before = " need ";
    REQUIRE(why.find(before) != why.npos);
    plan.pipeline.limit_bytes = std::stoll(why.substr(why.find(before) + before.size()));
    CHECK(plan.pipeline.limit_bytes <= least);
    const auto enough = sg::with_split(model, plan, batch);
    CHECK(sg::planned_activations(model, enough, batch).bytes <= plan.pipeline.limit_bytes);
    --plan.pipeline.limit_bytes;
    CHECK_THROWS_AS(sg::with_split(model, plan, batch), sg::Error);
  }
}

TEST_CASE("a search within bytes tells one result: that of the schedule it returns", "[graphs][step][pipeline]") {
  const auto model = sg::gpt2({.layers = 6, .width = 32, .heads = 4, .context = 32, .vocab = 256});
  const sg::BatchSpec batch{.global = 8, .micro = 1, .seq = 32};
  const sg::Plan plan{.layout = {.pp = 2}, .pipeline = {.schedule = "auto", .limit_bytes = 500 << 10}};
  std::vector<sg::SearchProgress> results;
  double last     = 0;
  const auto with = sg::with_split(model, plan, batch, {.on_search = [&](const sg::SearchProgress& progress) {
                                     CHECK(progress.elapsed_s >= last);
                                     last = progress.elapsed_s;
                                     if (progress.is_result) results.push_back(progress);
                                   }});
  REQUIRE(results.size() == 1);
  const auto costs = sg::stage_costs(model, with, batch);
  CHECK(results[0].bubble_rate == Approx(sg::simulate(*with.pipeline.found, {.costs = costs}).bubble_rate));
  CHECK(results[0].lower_bound_rate <= results[0].bubble_rate);
  CHECK_THAT(results[0].doing, ContainsSubstring("found by "));
}

TEST_CASE("with the bytes of a kind as limit, the searched schedule is no slower than the kind",
          "[graphs][step][pipeline]") {
  if (sg::testing::sanitized()) return;  // searches take long: the tests before run the same code
  const auto model = sg::llama({.layers = 6, .width = 16, .heads = 2, .context = 32, .vocab = 16, .inner = 32});
  const sg::BatchSpec batch{.global = 8, .micro = 1, .seq = 32};
  for (const auto& [kind, chunks] : {std::pair{"zb-v", 2}, {"1f1b", 1}}) {
    CAPTURE(kind);
    sg::Plan plan{.layout = {.pp = 3}, .pipeline = {.schedule = kind}};
    const auto costs           = sg::stage_costs(model, plan, batch);
    const auto schedule        = sg::schedule_of(plan.pipeline, 3, 8);
    const std::int64_t of_kind = sg::planned_activations(model, plan, batch).bytes;
    plan.pipeline              = {.schedule = "auto", .chunks = chunks, .limit_bytes = of_kind};
    const auto with            = sg::with_split(model, plan, batch);
    CHECK(sg::planned_activations(model, with, batch).bytes <= of_kind);
    CHECK(sg::simulate(*with.pipeline.found, {.costs = costs}).longest_span <=
          sg::simulate(schedule, {.costs = costs}).longest_span * (1 + 1e-12));
  }
}

TEST_CASE("the memory plan of a searched schedule keeps a limit in bytes", "[graphs][step][pipeline]") {
  if (sg::testing::sanitized()) return;  // searches take long: the tests before run the same code
  const auto model = sg::gpt2({.layers = 8, .width = 64, .heads = 4, .context = 64, .vocab = 64});
  const sg::BatchSpec batch{.global = 8, .micro = 1, .seq = 64};
  using Split = std::vector<int>;
  for (const auto& [chunks, split, mib] :
       {std::tuple{1, Split{2, 2, 2, 2}, 5}, {1, Split{2, 2, 2, 2}, 3}, {2, Split{}, 3}}) {
    CAPTURE(chunks, split, mib);
    const sg::Plan plan{
        .layout   = {.pp = 4},
        .pipeline = {.schedule = "auto", .chunks = chunks, .split = split, .limit_bytes = std::int64_t{mib} << 20}};
    CHECK(most_activations(model, plan, batch) <= plan.pipeline.limit_bytes);
  }
}

TEST_CASE("the memory plan follows the activations of the schedule", "[graphs][step][pipeline]") {
  if (sg::testing::sanitized()) return;  // planning takes long: other tests build and run steps of every kind
  std::map<std::string, double> bytes, units;
  for (const std::string kind : {"gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"}) {
    const sg::Plan plan{.layout = {.pp = 4}, .pipeline = {.schedule = kind}};
    const auto peaks = sg::peak_activations(sg::schedule_of(plan.pipeline, 4, batch_of_16.global));
    units[kind]      = *std::max_element(peaks.begin(), peaks.end());
    bytes[kind]      = static_cast<double>(most_activations(narrow_model(), plan, batch_of_16));
  }
  CAPTURE(bytes, units);
  CHECK(units["v-min"] == 2.5);
  CHECK(units["v-half"] == 3);
  CHECK(units["zb-v"] == 4);
  CHECK(units["zb-h2"] == 7);
  // As many bytes for each microbatch that is held, in kinds whose microbatches wait in the same way: for B, for W on
  // the last rank with the head, or for W in V placement.
  const auto each = [&](const char* kind) { return bytes[kind] / units[kind]; };
  CHECK(each("gpipe") == Approx(each("1f1b")).epsilon(0.07));
  CHECK(each("dualpipe-v") == Approx(each("1f1b")).epsilon(0.07));
  CHECK(each("zb-h2") == Approx(each("zb-h1")).epsilon(0.07));
  CHECK(each("v-half") == Approx(each("zb-v")).epsilon(0.1));
  CHECK(each("v-min") == Approx(each("zb-v")).epsilon(0.1));
  CHECK(bytes["v-min"] < 0.8 * bytes["1f1b"]);
  CHECK(bytes["v-half"] < 0.7 * bytes["zb-h1"]);
}
