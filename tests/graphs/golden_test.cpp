// Training against transformers: tests/data/golden holds the losses, gradient norms and first gradients of two small
// models trained there in float64.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <cmath>

#include "engine/error.hpp"
#include "graphs/layout.hpp"
#include "graphs/schedule_kinds.hpp"
#include "graphs/training_step.hpp"
#include "tests/support/golden.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using sg::testing::golden;
using sg::testing::train;

namespace {

// The larger; what is no number is larger than all.
double worse(double a, double b) { return b <= a ? a : b; }

double largest_error(const std::vector<double>& got, const std::vector<double>& expected) {
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) worst = worse(worst, std::abs(got[i] - expected[i]) / expected[i]);
  return worst;
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

// Largest relative differences from the golden run; of gradients, that of a whole tensor.
struct Errors {
  double loss = 0, norm = 0, gradient = 0;
};

Errors errors(const std::string& model, const sg::Plan& plan, int micro, int steps) {
  const auto& expected = golden(model);
  const auto got       = train(expected, plan, micro, steps);
  REQUIRE(got.loss.size() == static_cast<std::size_t>(steps));
  REQUIRE(got.grad_norm.size() == static_cast<std::size_t>(steps));
  REQUIRE(got.gradients.size() == expected.gradients.size());
  Errors found{.loss = largest_error(got.loss, expected.loss),
               .norm = largest_error(got.grad_norm, expected.grad_norm)};
  for (const auto& [name, values] : expected.gradients) {
    CAPTURE(name);
    std::vector<double> difference = got.gradients.at(name);
    REQUIRE(difference.size() == values.size());
    for (std::size_t i = 0; i < difference.size(); ++i) difference[i] -= values[i];
    found.gradient = worse(found.gradient, norm(difference) / norm(values));
  }
  return found;
}

void check_against_golden(const std::string& model, const sg::Plan& plan, int micro, int steps) {
  const Errors found = errors(model, plan, micro, steps);
  CHECK(found.loss < 2e-6);
  CHECK(found.norm < 5e-5);
  CHECK(found.gradient < 1e-5);
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
  if (sg::testing::scale() > 1 && degrees.tp * degrees.pp < 4) return;  // sanitizers see the largest ones
  check_against_golden(model, plan_of(degrees), 2, sg::testing::cases(20));
}

TEST_CASE("with sequence parallelism every layout trains as transformers does", "[graphs][golden]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const auto& degrees     = GENERATE(from_range(all_layouts));
  if (degrees.tp == 1) return;
  CAPTURE(model, degrees.dp, degrees.tp, degrees.pp);
  if (sg::testing::scale() > 1 && degrees.pp == 1) return;
  sg::Plan plan                 = plan_of(degrees);
  plan.layout.sequence_parallel = true;
  check_against_golden(model, plan, 2, sg::testing::cases(20));
}

TEST_CASE("every schedule trains as transformers does", "[graphs][golden]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  const auto kind         = GENERATE(from_range(sg::all_schedule_kinds));
  const int chunks        = kind == sg::ScheduleKind::interleaved ? 2 : 1;
  CAPTURE(model, kind);
  check_against_golden(model, plan_of({2, 2, 2}, std::string(to_string(kind)), chunks), 1, sg::testing::cases(5));
  if (sg::testing::scale() > 1) return;
  check_against_golden(model, plan_of({1, 1, 4}, std::string(to_string(kind))), 2, sg::testing::cases(5));
  check_against_golden(model, plan_of({1, 1, 2}, std::string(to_string(kind))), 4, sg::testing::cases(5));
}

// All that the layers and the batch allow; what they do not is refused by name. Says how near it all is.
TEST_CASE("all layouts, schedules and microbatches train as transformers does", "[.slow][golden]") {
  const std::string model = GENERATE("gpt2-tiny", "llama-tiny");
  using enum sg::ScheduleKind;
  Errors worst;
  int runs = 0;
  for (const Degrees& degrees : all_layouts) {
    for (const sg::ScheduleKind kind : sg::all_schedule_kinds) {
      for (const int micro : {1, 2, 4}) {
        for (const int chunks : {1, 2}) {
          CAPTURE(model, degrees.dp, degrees.tp, degrees.pp, kind, micro, chunks);
          const sg::Plan plan = plan_of(degrees, std::string(to_string(kind)), chunks);
          const int sequences = 8 / degrees.dp, microbatches = sequences / micro;  // of a data-parallel rank
          const bool one_chunk = kind == one_f_one_b || kind == zb_h1 || kind == zb_h2;
          const bool fits      = sequences % micro == 0 && degrees.pp * chunks <= 4 && (chunks == 1 || !one_chunk) &&
                            (chunks == 1 || kind != interleaved || microbatches % degrees.pp == 0);
          if (!fits) {
            sg::BatchSpec batch = golden(model).batch;
            batch.micro         = micro;
            CHECK_THROWS_AS(sg::training_step(golden(model).model, plan, batch), sg::Error);
            continue;
          }
          const Errors found = errors(model, plan, micro, 20);
          CHECK(found.loss < 2e-6);
          CHECK(found.norm < 5e-5);
          CHECK(found.gradient < 1e-5);
          worst = {worse(worst.loss, found.loss), worse(worst.norm, found.norm), worse(worst.gradient, found.gradient)};
          ++runs;
        }
      }
    }
  }
  WARN(model << ", " << runs << " runs: loss within " << worst.loss << ", norm " << worst.norm << ", first gradients "
             << worst.gradient);
}
