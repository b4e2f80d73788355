// Compares training with transformers: tests/data/golden has the losses, gradient norms and first gradients of two
// small models that transformers trained in float64.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <cmath>
#include <set>
#include <tuple>

#include "engine/base/error.hpp"
#include "graphs/layout/layout.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/step/training_step.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/training/golden.hpp"

namespace sg = stepgraph;
using sg::testing::golden;
using sg::testing::GoldenErrors;
using sg::testing::train;

namespace {

GoldenErrors check_against_golden(const std::string& model, const sg::Plan& plan, int micro, int steps) {
  return sg::testing::check_golden_bounds(golden(model), train(golden(model), plan, micro, steps), steps);
}

struct Degrees {
  int dp, tp, pp;
};
constexpr Degrees all_layouts[] = {{1, 1, 1}, {2, 1, 1}, {1, 2, 1}, {1, 1, 2},
                                   {1, 1, 4}, {2, 2, 2}, {1, 4, 2}, {4, 2, 1}};

sg::Plan plan_of(const Degrees& degrees, const std::string& schedule = "1f1b", int chunks = 1) {
  return {.layout   = {.dp = degrees.dp, .tp = degrees.tp, .pp = degrees.pp},
          .pipeline = {.schedule = schedule, .chunks = chunks}};
}

}  // namespace

TEST_CASE("every layout trains as transformers does", "[graphs][golden]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const auto& degrees     = GENERATE(from_range(all_layouts));
  CAPTURE(model, degrees.dp, degrees.tp, degrees.pp);
  if (sg::testing::scale() > 1 && degrees.tp * degrees.pp < 4) return;  // sanitized: only the largest layouts
  static int seen = 3;
  if (sg::testing::left_out(seen, 4)) return;     // of them, two: {2, 2, 2} and {1, 4, 2}
  const bool is_long = degrees.dp == degrees.pp;  // one rank, tp alone and all axes
  check_against_golden(model, plan_of(degrees), 2, is_long ? sg::testing::cases(20) : sg::testing::compared_steps(20));
}

TEST_CASE("with sequence parallelism every layout trains as transformers does", "[graphs][golden]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const auto& degrees     = GENERATE(from_range(all_layouts));
  if (degrees.tp == 1) return;
  CAPTURE(model, degrees.dp, degrees.tp, degrees.pp);
  if (sg::testing::scale() > 1 && degrees.pp == 1) return;
  static int seen = 0;
  if (sg::testing::left_out(seen, 3)) return;
  sg::Plan plan                 = plan_of(degrees);
  plan.layout.sequence_parallel = true;
  check_against_golden(model, plan, 2, sg::testing::compared_steps(20));
}

TEST_CASE("every schedule trains as transformers does", "[graphs][golden]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const auto kind         = GENERATE(from_range(sg::all_schedule_kinds));
  static int seen         = 0;
  if (sg::testing::left_out(seen, 2)) return;
  const int chunks = kind == sg::ScheduleKind::interleaved ? 2 : 1;
  CAPTURE(model, kind);
  if (sg::testing::sanitized()) {  // few ranks: other tests have more
    check_against_golden(model, plan_of({1, 1, 2}, std::string(to_string(kind)), chunks), 2, 1);
    return;
  }
  check_against_golden(model, plan_of({2, 2, 2}, std::string(to_string(kind)), chunks), 1, 5);
  if (!is_v_shaped(kind))  // the models have four layers
    check_against_golden(model, plan_of({1, 1, 4}, std::string(to_string(kind))), 2, 5);
  check_against_golden(model, plan_of({1, 1, 2}, std::string(to_string(kind))), 4, 5);
}

TEST_CASE("searched schedules train as transformers does", "[graphs][golden][search]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const int chunks        = GENERATE(1, 2);
  const double limit      = GENERATE(0, 1.5);
  static int seen         = 0;
  if (sg::testing::left_out(seen, 8)) return;  // sanitized: the first; pipeline_test.cpp has limits and chunks
  CAPTURE(model, chunks, limit);
  sg::Plan plan       = plan_of({2, 1, 2}, "auto", chunks);
  plan.pipeline.limit = limit;
  check_against_golden(model, plan, 1, sg::testing::cases(5));
}

namespace {

// All combinations that the layers and the batch allow; the others must be refused. Every `stride`-th of them runs.
// If all layouts, schedules and microbatches must be among them, that is checked. Prints the largest errors.
void check_grid(const std::string& model, int stride, int steps, bool all_seen) {
  using enum sg::ScheduleKind;
  GoldenErrors worst;
  int runs = 0, allowed = 0, refused = 0;
  std::set<std::tuple<int, int, int>> layouts;
  std::set<sg::ScheduleKind> kinds;
  std::set<int> micros, chunk_counts;
  for (const Degrees& degrees : all_layouts) {
    for (const sg::ScheduleKind kind : sg::all_schedule_kinds) {
      for (const int micro : {1, 2, 4}) {
        for (const int chunks : {1, 2}) {
          if (is_v_shaped(kind) && chunks == 1) continue;  // stands for 2
          CAPTURE(model, degrees.dp, degrees.tp, degrees.pp, kind, micro, chunks);
          const sg::Plan plan = plan_of(degrees, std::string(to_string(kind)), chunks);
          const int sequences = 8 / degrees.dp, microbatches = sequences / micro;  // per data-parallel rank
          const bool one_chunk = kind == one_f_one_b || kind == zb_h1 || kind == zb_h2;
          const bool fits      = sequences % micro == 0 && degrees.pp * chunks <= 4 && (chunks == 1 || !one_chunk) &&
                            (chunks == 1 || kind != interleaved || microbatches % degrees.pp == 0);
          if (!fits) {
            sg::BatchSpec batch = golden(model).batch;
            batch.micro         = micro;
            CHECK_THROWS_AS(sg::training_step(golden(model).model, plan, batch), sg::Error);
            ++refused;
            continue;
          }
          if (allowed++ % stride != 0) continue;
          const GoldenErrors found = check_against_golden(model, plan, micro, steps);
          worst.loss               = std::max(worst.loss, found.loss);
          worst.norm               = std::max(worst.norm, found.norm);
          worst.gradient           = std::max(worst.gradient, found.gradient);
          ++runs;
          layouts.emplace(degrees.dp, degrees.tp, degrees.pp);
          kinds.insert(kind);
          micros.insert(micro);
          chunk_counts.insert(chunks);
        }
      }
    }
  }
  CHECK(allowed + refused == 8 * 3 * (7 * 2 + 4));
  CHECK(runs == (allowed + stride - 1) / stride);
  CHECK(runs >= 3);
  if (all_seen) {
    CHECK(layouts.size() == std::size(all_layouts));
    CHECK(kinds == std::set(sg::all_schedule_kinds.begin(), sg::all_schedule_kinds.end()));
    CHECK(micros == std::set{1, 2, 4});
    CHECK(chunk_counts == std::set{1, 2});
  }
  if (stride == 1)
    WARN(model << ", " << runs << " runs: loss within " << worst.loss << ", norm " << worst.norm << ", first gradients "
               << worst.gradient);
}

}  // namespace

TEST_CASE("a share of all layouts, schedules and microbatches trains as transformers does", "[graphs][golden]") {
  // Every eighth has all layouts, schedules and microbatches. Sanitized builds are too slow for as many runs.
  const bool sanitized    = sg::testing::scale() > 1;
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  if (sanitized && model == "gpt2-tiny") return;
  check_grid(model, sanitized ? 61 : 8, sg::testing::runs_all() ? 5 : sg::testing::cases(3), !sanitized);
}

TEST_CASE("all layouts, schedules and microbatches train as transformers does", "[.slow][golden]") {
  check_grid(GENERATE("gpt2-tiny", "llama-tiny"), 1, 20, true);
}
