#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <map>

#include "engine/base/error.hpp"
#include "engine/simulate/simulate.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/schedule/csv.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/lowering.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/schedules/schedules.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using sg::ActionKind;
using sg::ScheduleKind;

namespace {

int draw(std::mt19937_64& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

// Multiples of a quarter, so that sums are exact in any order. Some are 0.
std::vector<sg::Costs> random_costs(std::mt19937_64& random, int ranks) {
  std::vector<sg::Costs> costs;
  for (int rank = 0; rank < ranks; ++rank) {
    costs.push_back({draw(random, 1, 12) / 4.0, draw(random, 0, 12) / 4.0, draw(random, 0, 12) / 4.0,
                     std::max(0, draw(random, -3, 6)) / 4.0});
  }
  if (draw(random, 0, 1) == 0) costs.assign(static_cast<std::size_t>(ranks), costs.front());
  return costs;
}

// Whether each stage has, for each microbatch, one F and either one B or one I and one W, on the rank of its placement.
bool each_action_once(const sg::PipelineSchedule& schedule, ScheduleKind kind) {
  std::map<sg::Action, int> count;
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    for (const sg::Action& action : schedule.rows[rank]) {
      const auto stage = static_cast<std::size_t>(sg::index(action.stage));
      const auto p     = schedule.rows.size();
      if ((sg::is_v_shaped(kind) ? std::min(stage, 2 * p - 1 - stage) : stage % p) != rank) return false;
      ++count[action];
    }
  }
  const bool split  = kind == ScheduleKind::zb_h1 || kind == ScheduleKind::zb_h2 || sg::is_v_shaped(kind);
  const bool joined = !split || kind == ScheduleKind::dualpipe_v;
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    for (int microbatch = 0; microbatch < schedule.num_microbatches; ++microbatch) {
      const auto times = [&](ActionKind of) {
        const auto found = count.find({sg::Stage{stage}, of, sg::Microbatch{microbatch}});
        return found == count.end() ? 0 : found->second;
      };
      const int f = times(ActionKind::forward), i = times(ActionKind::input_gradient);
      const int w = times(ActionKind::weight_gradient), b = times(ActionKind::backward);
      if (f != 1 || i != w || i + b != 1 || (i == 1 && !split) || (b == 1 && !joined)) return false;
    }
  }
  return true;
}

double most_held(const sg::testing::ScheduleCase& what, int rank) {
  const int p = what.spec.ranks, m = what.spec.microbatches;
  switch (what.kind) {
    case ScheduleKind::round_robin:
      return 1;
    case ScheduleKind::one_f_one_b:
      return p - rank;
    case ScheduleKind::zb_h1:
      return p;
    case ScheduleKind::zb_h2:
      return 2 * p - 1;
    case ScheduleKind::zb_v:
      return p;
    case ScheduleKind::v_half:
      return (p + 2) / 2.0;
    case ScheduleKind::v_min:
      return (p + 4) / 3.0 + 0.25;
    case ScheduleKind::dualpipe_v:
      return p + 0.5;
    case ScheduleKind::interleaved:
      return what.spec.chunks == 1 ? p - rank
                                   : (2.0 * (p - 1 - rank) + (what.spec.chunks - 1) * p + 1) / what.spec.chunks;
    default:
      return m;
  }
}

}  // namespace

TEST_CASE("random schedules are valid, do every action once, hold the promised activations, and parse back",
          "[graphs][schedule][property]") {
  std::mt19937_64 random(20240501);
  for (int i = 0; i < (sg::testing::sanitized() ? 400 : 10'000); ++i) {
    const auto what     = sg::testing::random_schedule_case(random, 10, 20);
    const auto schedule = sg::pipeline_schedule(what.kind, what.spec);
    CAPTURE(i, what.kind, what.spec.ranks, what.spec.microbatches, what.spec.chunks);
    const auto flaw = sg::find_flaw(schedule);
    INFO((flaw ? flaw->message : ""));
    REQUIRE_FALSE(flaw);
    REQUIRE(each_action_once(schedule, what.kind));
    const auto peaks = sg::peak_activations(schedule);
    for (int rank = 0; rank < what.spec.ranks; ++rank)
      REQUIRE(peaks[static_cast<std::size_t>(rank)] <= most_held(what, rank));
    REQUIRE(sg::parse_schedule(sg::to_string(schedule)) == schedule);
    REQUIRE(sg::parse_csv(sg::to_csv(schedule)) == schedule);
    const auto lowered = sg::with_send_recv(schedule);
    REQUIRE_FALSE(sg::find_flaw(lowered));
    REQUIRE(sg::parse_csv(sg::to_csv(lowered)) == lowered);
    sg::PipelineSchedule without = lowered;
    for (auto& row : without.rows) std::erase_if(row, [](const sg::Action& a) { return sg::is_transfer(a.kind); });
    REQUIRE(without == schedule);
  }
}

TEST_CASE("random schedules take the time of a simple reference simulation", "[graphs][schedule][property]") {
  std::mt19937_64 random(7);
  for (int i = 0; i < sg::testing::cases(5000); ++i) {
    const auto what     = sg::testing::random_schedule_case(random, 7, 9);
    const auto schedule = sg::pipeline_schedule(what.kind, what.spec);
    const auto costs    = random_costs(random, what.spec.ranks);
    CAPTURE(i, what.kind, what.spec.ranks, what.spec.microbatches, what.spec.chunks);
    const auto timeline = sg::simulate(schedule, {.costs = costs});
    const auto expected = sg::testing::reference_times(schedule, costs);
    double makespan = 0, longest = 0, work = 0;
    for (std::size_t rank = 0; rank < expected.size(); ++rank) {
      REQUIRE(timeline.rows[rank].size() == expected[rank].size());
      for (std::size_t k = 0; k < expected[rank].size(); ++k) {
        REQUIRE(timeline.rows[rank][k].begin_s == Approx(expected[rank][k].begin_s).margin(1e-12));
        REQUIRE(timeline.rows[rank][k].end_s == Approx(expected[rank][k].end_s).margin(1e-12));
      }
      makespan = std::max(makespan, expected[rank].back().end_s);
      longest  = std::max(longest, expected[rank].back().end_s - expected[rank].front().begin_s);
      work     = std::max(work, what.spec.microbatches * (costs[rank].F + costs[rank].I + costs[rank].W));
    }
    REQUIRE(timeline.makespan == Approx(makespan));
    REQUIRE(timeline.bubble_rate == Approx((longest - work) / longest).margin(1e-12));
  }
}

TEST_CASE("graphs of random schedules are sound", "[graphs][schedule][property]") {
  std::mt19937_64 random(99);
  for (int i = 0; i < sg::testing::cases(3000); ++i) {
    const auto what = sg::testing::random_schedule_case(random, 6, 8);
    CAPTURE(i, what.kind, what.spec.ranks, what.spec.microbatches, what.spec.chunks);
    auto schedule = sg::pipeline_schedule(what.kind, what.spec);
    if (draw(random, 0, 2) == 0) schedule = sg::with_reduce_grad(sg::with_unshard(schedule, draw(random, 1, 3)));
    const auto built = sg::schedule_graph(schedule, {sg::Costs{}});
    const auto flaws = sg::find_flaws(built.graph);
    INFO((flaws.empty() ? "" : flaws.front().message));
    REQUIRE(flaws.empty());
  }
}

TEST_CASE("validate reports a changed schedule exactly if the reference simulation gets stuck",
          "[graphs][schedule][property]") {
  std::mt19937_64 random(31);
  int stuck = 0, fine = 0;
  for (int i = 0; i < sg::testing::cases(3000); ++i) {
    const auto what = sg::testing::random_schedule_case(random, 5, 6);
    auto schedule   = sg::pipeline_schedule(what.kind, what.spec);
    auto& row       = schedule.rows[static_cast<std::size_t>(draw(random, 0, what.spec.ranks - 1))];
    const int last  = static_cast<int>(row.size()) - 1;
    for (int swaps = draw(random, 1, 2); swaps > 0; --swaps) {
      const int at = draw(random, 0, last), by = draw(random, 1, 4);
      std::swap(row[static_cast<std::size_t>(at)], row[static_cast<std::size_t>(std::min(last, at + by))]);
    }
    CAPTURE(i, sg::to_string(schedule));
    const std::vector<sg::Costs> costs(schedule.rows.size());
    const auto times = sg::testing::reference_times(schedule, costs);
    bool finishes    = true;
    for (std::size_t rank = 0; rank < times.size(); ++rank)
      finishes &= times[rank].size() == schedule.rows[rank].size();
    const auto flaw = sg::find_flaw(schedule);
    REQUIRE(flaw.has_value() == !finishes);
    ++(finishes ? fine : stuck);
    if (flaw) {  // it names the first action of each rank that could not run
      for (const sg::Cell& cell : flaw->cells) REQUIRE(times[cell.row].size() == cell.column);
    } else {  // the graph of the changed schedule is sound
      const auto built = sg::schedule_graph(schedule, costs);
      REQUIRE(sg::find_flaws(built.graph).empty());
    }
  }
  CHECK(stuck >= sg::testing::at_least(500));
  CHECK(fine >= sg::testing::at_least(500));
}

TEST_CASE("a schedule with a missing, duplicate or misplaced action is refused", "[graphs][schedule][property]") {
  std::mt19937_64 random(5);
  for (int i = 0; i < sg::testing::cases(4000); ++i) {
    const auto what = sg::testing::random_schedule_case(random, 5, 6);
    auto schedule   = sg::pipeline_schedule(what.kind, what.spec);
    if (draw(random, 0, 1) == 0) schedule = sg::with_send_recv(schedule);
    auto& row     = schedule.rows[static_cast<std::size_t>(draw(random, 0, what.spec.ranks - 1))];
    const auto at = row.begin() + draw(random, 0, static_cast<int>(row.size()) - 1);
    switch (draw(random, 0, 3)) {
      case 0:
        row.erase(at);
        break;
      case 1:
        row.push_back(*at);
        break;
      case 2:
        at->microbatch = sg::Microbatch{(sg::index(at->microbatch) + 1) % (what.spec.microbatches + 1)};
        break;
      default:
        at->stage = sg::Stage{(sg::index(at->stage) + 1) % (schedule.num_stages() + 1)};
    }
    CAPTURE(i, sg::to_string(schedule));
    REQUIRE(sg::find_flaw(schedule));
    REQUIRE_THROWS_AS(sg::validate(schedule), sg::Error);
  }
}
