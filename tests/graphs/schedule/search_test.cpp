#include "graphs/schedule/search.hpp"

#include <algorithm>
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "engine/base/error.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/simulation.hpp"
#include "graphs/schedule/validate.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/schedules.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::ActionKind;
using sg::SearchChunks;

namespace {

// A row of tests/data/zero_bubble.csv.
struct PaperRow {
  std::string model;
  int p = 0, m = 0;
  sg::Costs costs;
  double zb_1p = 0, zb_2p = 0;
  double retain = 0;  // 32 h / (34 h + 5 a s) of the model
};

std::vector<PaperRow> paper_rows() {
  const std::map<std::string, std::pair<double, double>> shapes{
      {"1.5B", {24, 2304}}, {"6.2B", {32, 4096}}, {"14.6B", {40, 5120}}, {"28.3B", {48, 6144}}};  // heads, hidden
  std::ifstream file(sg::str(sg::testing::source_path(), "/tests/data/zero_bubble.csv"));
  std::vector<PaperRow> rows;
  for (std::string text; std::getline(file, text);) {
    if (text.empty() || text.front() == '#' || text.starts_with("model")) continue;
    std::istringstream cells(text);
    std::vector<std::string> values;
    for (std::string cell; std::getline(cells, cell, ',');) values.push_back(cell);
    const auto number  = [&](std::size_t i) { return std::stod(values.at(i)); };
    const auto [a, h]  = shapes.at(values.at(0));
    constexpr double s = 1024;
    rows.push_back({.model  = values.at(0),
                    .p      = std::stoi(values.at(1)),
                    .m      = std::stoi(values.at(2)),
                    .costs  = {number(3), number(4), number(5), number(6)},
                    .zb_1p  = number(11),
                    .zb_2p  = number(12),
                    .retain = 32 * h / (34 * h + 5 * a * s)});
  }
  return rows;
}

double round4(double rate) { return std::round(rate * 1e4) / 1e4; }

// Rate and peaks from times that share no code with the engine or the search.
struct Independent {
  bool complete = false;
  double rate = 0, peak = 0;
};

Independent independent(const sg::PipelineSchedule& schedule, std::vector<sg::Costs> costs, double retain) {
  costs.resize(schedule.rows.size(), costs.front());
  const auto times = sg::testing::reference_times(schedule, costs);
  Independent result{.complete = true};
  double span = 0, work = 0;
  for (std::size_t rank = 0; rank < times.size(); ++rank) {
    if (times[rank].size() != schedule.rows[rank].size()) return {};
    span = std::max(span, times[rank].back().end_s - times[rank].front().begin_s);
    work = std::max(work, schedule.num_microbatches * (costs[rank].F + costs[rank].I + costs[rank].W));
    // Activations over time: what each action allocates at its begin and frees at its end.
    const double unit = 1.0 / schedule.stages_per_rank()[rank];
    double held       = 0;
    for (const sg::Action& action : schedule.rows[rank]) {
      if (action.kind == ActionKind::forward) held += unit;
      result.peak = std::max(result.peak, held);
      if (action.kind == ActionKind::input_gradient) held -= (1 - retain) * unit;
      if (action.kind == ActionKind::weight_gradient) held -= retain * unit;
      if (action.kind == ActionKind::backward) held -= unit;
    }
  }
  result.rate = 1 - work / span;
  return result;
}

void check_found(const sg::FoundSchedule& found, const sg::ScheduleSearch& search) {
  CHECK(sg::validate(found.schedule).weights_in_order);
  const auto again = independent(found.schedule, search.costs, search.retain);
  REQUIRE(again.complete);
  CHECK(found.bubble_rate == Approx(again.rate).margin(1e-9));
  CHECK(*std::max_element(found.peak_activation.begin(), found.peak_activation.end()) == Approx(again.peak));
  if (search.limit > 0) CHECK(again.peak <= search.limit + 1e-9);
  CHECK(found.lower_bound_rate <= found.bubble_rate);
  CHECK(found.lower_bound_rate >= 0);
}

// Of the fixed kinds that fit the limit. 2: none fits.
double best_kind(const sg::ScheduleSearch& search, int chunks) {
  double best = 2;
  for (const sg::ScheduleKind kind : sg::all_schedule_kinds) {
    const sg::ScheduleSpec spec{search.ranks, search.microbatches, chunks};
    try {
      sg::check_schedule_spec(kind, spec);
    } catch (const sg::Error&) {
      continue;
    }
    const auto timeline = sg::simulate(sg::pipeline_schedule(kind, spec), {search.costs, search.retain});
    const double peak   = *std::max_element(timeline.peak_activation.begin(), timeline.peak_activation.end());
    if (search.limit == 0 || peak <= search.limit) best = std::min(best, timeline.bubble_rate);
  }
  return best;
}

sg::ScheduleSearch random_search(std::mt19937_64& random, int max_ranks, int max_microbatches) {
  const auto draw = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); };
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  sg::ScheduleSearch search{.ranks = pick(2, max_ranks), .microbatches = pick(2, max_microbatches)};
  const double spread = pick(0, 1) == 0 ? 0.2 : 0.8, transfer = pick(0, 1) == 0 ? 0 : draw(0, 1);
  search.costs.clear();
  for (int rank = 0; rank < (pick(0, 3) == 0 ? 1 : search.ranks); ++rank)
    search.costs.push_back(
        {draw(1 - spread, 1 + spread), draw(1 - spread, 1 + spread), draw(1 - spread, 1 + spread), transfer});
  search.costs.resize(search.costs.size() == 1 ? 1 : static_cast<std::size_t>(search.ranks), search.costs.front());
  search.limit = std::max(1.0, draw(search.ranks / 3.0, 2.0 * search.ranks));
  if (pick(0, 1) == 0) search.limit = std::floor(search.limit);
  search.retain   = pick(0, 1) == 0 ? 1 : draw(0.2, 1);
  search.seed     = random();
  search.budget_s = 0.2;
  search.by_clock = false;
  return search;
}

void check_random_cases(int count, int max_ranks, int max_microbatches, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  int better = 0;
  for (int i = 0; i < count; ++i) {
    sg::ScheduleSearch search = random_search(random, max_ranks, max_microbatches);
    CAPTURE(i, search.ranks, search.microbatches, search.limit, search.retain);
    const double of_kinds = best_kind(search, 1);
    const auto found      = sg::search_schedule(search);
    check_found(found, search);
    CHECK(found.bubble_rate <= of_kinds + 1e-9);
    better += found.bubble_rate < of_kinds - 1e-6;
    CHECK_FALSE(found.out_of_time);
  }
  CHECK(better >= count / 2);
}

// round(rate, 4) against the printed ones. Returns whether the rate at limit 2p is strictly below.
bool check_paper_row(const PaperRow& row) {
  CAPTURE(row.model, row.p, row.m);
  sg::ScheduleSearch search{.ranks        = row.p,
                            .microbatches = row.m,
                            .costs        = {row.costs},
                            .retain       = row.retain,
                            .limit        = 2.0 * row.p,
                            .by_clock     = false};
  const auto wide = sg::search_schedule(search);
  check_found(wide, search);
  CHECK(round4(wide.bubble_rate) <= row.zb_2p);
  CHECK(wide.bubble_rate == Approx(wide.lower_bound_rate).margin(1e-7));  // none is better
  search.limit      = row.p;
  const auto narrow = sg::search_schedule(search);
  check_found(narrow, search);
  CHECK(round4(narrow.bubble_rate) <= row.zb_1p);
  CHECK(narrow.bubble_rate == Approx(narrow.lower_bound_rate).margin(1e-7));
  return round4(wide.bubble_rate) < row.zb_2p;
}

}  // namespace

TEST_CASE("the search beats the printed rates of the Zero Bubble paper on small pipelines, or proves that none can",
          "[graphs][schedule][search]") {
  const auto rows = paper_rows();
  REQUIRE(rows.size() == 8);
  CHECK_FALSE(check_paper_row(rows[0]));  // printed: 0.0433, which is the bound
  CHECK(check_paper_row(rows[1]));
  CHECK(check_paper_row(rows[2]));
}

TEST_CASE("the search beats the printed rates of the Zero Bubble paper on seven of eight rows",
          "[.nightly][graphs][schedule][search]") {
  int better = 0;
  for (const PaperRow& row : paper_rows()) better += check_paper_row(row);
  CHECK(better == 7);
}

TEST_CASE("found schedules are valid, within their limit, and no worse than fixed kinds",
          "[graphs][schedule][search]") {
  check_random_cases(sg::testing::cases(30), 8, 24, 240);
}

TEST_CASE("300 found schedules are valid, within their limit, and no worse than fixed kinds",
          "[.nightly][graphs][schedule][search]") {
  check_random_cases(300, 16, 64, 241);
}

TEST_CASE("two chunks are searched in looped and V placement, and are no worse than kinds with the same peak",
          "[graphs][schedule][search]") {
  for (const sg::ScheduleKind kind :
       {sg::ScheduleKind::zb_v, sg::ScheduleKind::v_half, sg::ScheduleKind::v_min, sg::ScheduleKind::dualpipe_v}) {
    for (const auto& [p, m] : {std::pair{4, 12}, {6, 14}}) {
      CAPTURE(kind, p, m);
      sg::ScheduleSearch search{
          .ranks = p, .microbatches = m, .chunks = SearchChunks::any, .budget_s = 0.1, .by_clock = false};
      if (m == 14) search.costs = {{1.2, 1, 0.7, 0.1}};
      const auto timeline = sg::simulate(sg::pipeline_schedule(kind, {.ranks = p, .microbatches = m}), {search.costs});
      search.limit        = *std::max_element(timeline.peak_activation.begin(), timeline.peak_activation.end());
      const auto found    = sg::search_schedule(search);
      check_found(found, search);
      CHECK(found.bubble_rate <= timeline.bubble_rate + 1e-9);
      CHECK(found.bubble_rate <= best_kind(search, 1) + 1e-9);
      CHECK(found.bubble_rate <= best_kind(search, 2) + 1e-9);
      search.chunks  = SearchChunks::two;
      const auto two = sg::search_schedule(search);
      check_found(two, search);
      CHECK(two.schedule.num_stages() == 2 * p);
      CHECK(two.bubble_rate <= best_kind(search, 2) + 1e-9);
    }
  }
}

TEST_CASE("W of a found schedule are in microbatch order where kinds with other orders are as fast",
          "[graphs][schedule][search]") {
  // Without W, all of round-robin's rivals have the same span: sequential, gpipe and 1f1b. The last holds the least.
  sg::ScheduleSearch search{.ranks = 4, .microbatches = 8, .costs = {{1, 2, 0, 0}}, .budget_s = 0.1, .by_clock = false};
  const auto found = sg::search_schedule(search);
  check_found(found, search);
  CHECK(found.bubble_rate <= best_kind(search, 1) + 1e-9);
  CHECK(*std::max_element(found.peak_activation.begin(), found.peak_activation.end()) <= 4);
  search.chunks  = SearchChunks::any;
  const auto any = sg::search_schedule(search);
  CHECK(sg::validate(any.schedule).weights_in_order);
}

TEST_CASE("stages can have costs of their own in a search", "[graphs][schedule][search]") {
  // The last stage has a head. Rank 0 has it in V placement, rank 1 in looped placement.
  const std::vector<sg::Costs> costs{{0.3, 0.3, 0.3, 0.1}, {1, 1, 1, 0.1}, {1, 1, 1, 0.1}, {2, 2, 1.5, 0.1}};
  const auto found = sg::search_schedule({.ranks        = 2,
                                          .microbatches = 8,
                                          .chunks       = SearchChunks::any,
                                          .costs        = costs,
                                          .limit        = 3,
                                          .budget_s     = 0.1,
                                          .by_clock     = false});
  CHECK(found.schedule.rank_of_stage == sg::v_placement(2));
  const auto timeline = sg::simulate(found.schedule, {.costs = costs});
  CHECK(timeline.bubble_rate == found.bubble_rate);
  CHECK(timeline.longest_span == found.longest_span);
  const auto one = sg::search_schedule(
      {.ranks = 4, .microbatches = 8, .costs = costs, .limit = 4, .budget_s = 0.1, .by_clock = false});
  CHECK(one.bubble_rate < best_kind({.ranks = 4, .microbatches = 8, .costs = costs, .limit = 4}, 1));
}

TEST_CASE("a search gives the same schedule again, and tells its progress", "[graphs][schedule][search]") {
  sg::ScheduleSearch search{.ranks        = 5,
                            .microbatches = 11,
                            .chunks       = SearchChunks::any,
                            .costs        = {{1.1, 0.9, 0.6, 0.2}},
                            .limit        = 4,
                            .budget_s     = 0.2,
                            .by_clock     = false,
                            .seed         = 7};
  const auto first   = sg::search_schedule(search);
  int told           = 0;
  search.on_progress = [&](const sg::SearchProgress& progress) {
    ++told;
    CHECK(progress.bubble_rate >= progress.lower_bound_rate);
    CHECK(progress.bubble_rate <= 1);
    CHECK_FALSE(progress.doing.empty());
  };
  const auto second = sg::search_schedule(search);
  CHECK(told > 0);
  CHECK(first.schedule == second.schedule);
  CHECK(first.bubble_rate == second.bubble_rate);
  CHECK(first.how == second.how);
  CHECK_FALSE(first.out_of_time);
}

TEST_CASE("a search without time still gives a valid schedule, and says so", "[graphs][schedule][search]") {
  const sg::ScheduleSearch search{
      .ranks = 6, .microbatches = 20, .costs = {{1, 1.3, 0.4, 0.3}}, .limit = 3, .budget_s = 1e-9};
  const auto found = sg::search_schedule(search);
  check_found(found, search);
  CHECK(found.out_of_time);
}

TEST_CASE("searches with impossible numbers are refused", "[graphs][schedule][search][refuses]") {
  const auto refused = [](const sg::ScheduleSearch& search, const std::string& why) {
    CHECK_THROWS_MATCHES(sg::search_schedule(search), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refused({.ranks = 0, .microbatches = 1}, "auto: 0 pipeline ranks (1 to 1024)");
  refused({.ranks = 2, .microbatches = 0}, "auto: 0 microbatches (1 to 65535)");
  refused({.ranks = 1024, .microbatches = 65535}, "(at most 2^21)");
  refused({.ranks = 2, .microbatches = 2, .limit = 0.5}, "auto: a limit of 0.5 (at least 1");
  refused({.ranks = 2, .microbatches = 2, .limit = -1}, "auto: a limit of -1 (at least 1");
  refused({.ranks = 2, .microbatches = 2, .retain = 1.5}, "auto: retain 1.5 (0 to 1)");
  refused({.ranks = 2, .microbatches = 2, .budget_s = 0}, "auto: a budget of 0 s (above 0)");
  refused({.ranks = 3, .microbatches = 2, .costs = {{}, {}}}, "2 costs for 3 ranks");
}
