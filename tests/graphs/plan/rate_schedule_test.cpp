#include "graphs/plan/rate_schedule.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>

#include "engine/base/error.hpp"
#include "graphs/plan/plan.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::Message;

namespace {

sg::RateKind kind_of(const std::string& name) {
  for (const auto kind : {sg::RateKind::constant, sg::RateKind::linear, sg::RateKind::cosine, sg::RateKind::wsd}) {
    if (sg::to_string(kind) == name) return kind;
  }
  throw std::runtime_error(name);
}

}  // namespace

TEST_CASE("rate schedules equal those of transformers to 1e-12", "[graphs][rate_schedule]") {
  std::ifstream file(sg::testing::data_file("rate_schedules.csv"));
  std::string line, kind, cell;
  int num_rows = 0;
  std::getline(file, line);  // the heading
  while (std::getline(file, line)) {
    CAPTURE(line);
    std::istringstream row(line);
    std::getline(row, kind, ',');
    double numbers[6];  // warmup, decay, steps, min, step, factor
    for (double& number : numbers) {
      std::getline(row, cell, ',');
      number = std::stod(cell);
    }
    const auto whole = [&](int i) { return static_cast<std::int64_t>(numbers[i]); };
    const sg::RateSchedule schedule{
        .kind = kind_of(kind), .warmup = whole(0), .decay = whole(1), .steps = whole(2), .min = numbers[3]};
    CHECK_NOTHROW(sg::check_rate_schedule(schedule));
    CHECK(std::abs(sg::rate_factor(schedule, whole(4)) - numbers[5]) < 1e-12);
    ++num_rows;
  }
  CHECK(num_rows > 300);
}

TEST_CASE("after their last step linear and wsd stay at their minimum", "[graphs][rate_schedule]") {
  for (const auto kind : {sg::RateKind::linear, sg::RateKind::wsd}) {
    const sg::RateSchedule schedule{
        .kind = kind, .warmup = 2, .decay = kind == sg::RateKind::wsd ? 3 : 0, .steps = 10, .min = 0.125};
    for (const std::int64_t step : {10, 11, 15, 20, 1'000'000}) CHECK(sg::rate_factor(schedule, step) == 0.125);
  }
  CHECK(sg::rate_factor({.warmup = 3}, std::int64_t{1} << 40) == 1);
}

TEST_CASE("a schedule without a number of steps takes that of the run", "[graphs][rate_schedule]") {
  const sg::RateSchedule linear{.kind = sg::RateKind::linear, .warmup = 2};
  CHECK(sg::with_total_steps(linear, 10).steps == 10);
  CHECK(sg::with_total_steps({.kind = sg::RateKind::linear, .steps = 4}, 10).steps == 4);
  CHECK(sg::with_total_steps({.kind = sg::RateKind::cosine, .steps = 10}, 10).steps == 10);
  CHECK_THROWS_MATCHES(sg::with_total_steps({.kind = sg::RateKind::cosine, .steps = 9}, 10), sg::Error,
                       Message("optimizer.schedule.steps: 9 with a run of 10 steps: after its end a cosine rises again "
                               "(10 or more, or fewer steps of the run)"));
  CHECK(sg::with_total_steps({.warmup = 100}, 10) == sg::RateSchedule{.warmup = 100});  // constant
  CHECK_THROWS_MATCHES(sg::with_total_steps(linear, 1), sg::Error,
                       Message("optimizer.schedule.steps: 1 steps are fewer than warmup 2 (as many or more)"));
}

TEST_CASE("a schedule with values out of range or without effect is refused by name",
          "[graphs][rate_schedule][refuses]") {
  const auto refuses = [](const sg::RateSchedule& schedule, const char* what) {
    CHECK_THROWS_MATCHES(sg::check_rate_schedule(schedule), sg::Error,
                         Message(std::string("optimizer.schedule.") + what));
  };
  using enum sg::RateKind;
  refuses({.warmup = -1}, "warmup: -1 (0 or more)");
  refuses({.kind = cosine, .min = 1.5}, "min: 1.5 (a ratio of lr, from 0 to 1)");
  refuses({.kind = wsd}, "decay: missing with kind wsd (steps of its last phase)");
  refuses({.kind = cosine, .decay = 5}, "decay: 5 has no effect with kind cosine (kind wsd, whose last phase it is)");
  refuses({.steps = 5}, "steps: 5 has no effect with kind constant (kind linear, cosine or wsd)");
  refuses({.min = 0.5}, "min: 0.5 has no effect with kind constant (kind linear, cosine or wsd)");
  refuses({.kind = wsd, .warmup = 5, .decay = 6, .steps = 10},
          "steps: 10 steps are fewer than warmup 5 + decay 6 (as many or more)");
}

TEST_CASE("the first group whose pattern matches the whole name of a tensor applies", "[graphs][plan]") {
  const std::vector<sg::OptimizerGroup> groups{{.match = "h.0.*", .lr = 1.0},
                                               {.match = "*.bias", .lr = 2.0},
                                               {.match = "h.?.ln*w*t", .lr = 3.0},
                                               {.match = "wte"}};
  CHECK(sg::group_of(groups, "h.0.attn.bias") == 1);
  CHECK(sg::group_of(groups, "h.1.attn.bias") == 2);
  CHECK(sg::group_of(groups, ".bias") == 2);
  CHECK(sg::group_of(groups, "h.1.attn.biases") == 0);
  CHECK(sg::group_of(groups, "h.1.ln_1.weight") == 3);
  CHECK(sg::group_of(groups, "h.12.ln_1.weight") == 0);
  CHECK(sg::group_of(groups, "wte") == 4);
  CHECK(sg::group_of(groups, "wte.weight") == 0);
  CHECK(sg::group_of({{.match = "*a*b*ab"}}, "xaybzab") == 1);
  CHECK(sg::group_of({{.match = "*a*b*ab"}}, "xaybza") == 0);
  CHECK(sg::group_of({{.match = "**"}}, "") == 1);
  CHECK(sg::rates_of({.lr = 0.5, .groups = {{.match = "a", .lr = 0.25}, {.match = "b"}}}, 1.0) ==
        std::vector{1.0, 0.5, 1.0});
}
