#include "graphs/schedule/simulation.hpp"

#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "engine/base/error.hpp"
#include "graphs/schedule/drawing.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/lowering.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/scale.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::ScheduleKind;

namespace {

using Line = std::map<std::string, std::string>;  // by heading

std::vector<Line> read_table(const std::string& name) {
  std::ifstream file(sg::str(sg::testing::source_path(), "/tests/data/", name));
  std::vector<std::string> headings;
  std::vector<Line> lines;
  for (std::string text; std::getline(file, text);) {
    if (text.empty() || text.front() == '#') continue;
    std::istringstream cells(text);
    std::vector<std::string> values;
    for (std::string cell; std::getline(cells, cell, ',');) values.push_back(cell);
    if (headings.empty()) {
      headings = values;
      continue;
    }
    for (std::size_t i = 0; i < headings.size(); ++i)
      (i == 0 ? lines.emplace_back() : lines.back())[headings[i]] = values.at(i);
  }
  return lines;
}

std::string four_decimals(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4f", value);
  return text;
}

sg::ScheduleTimeline simulated(ScheduleKind kind, const sg::ScheduleSpec& spec, const sg::Costs& costs) {
  return sg::simulate(sg::pipeline_schedule(kind, spec), {.costs = {costs}});
}

}  // namespace

TEST_CASE("simulated bubble rates equal those of the Zero Bubble paper to the last digit",
          "[graphs][schedule][simulation]") {
  const auto lines = read_table("zero_bubble.csv");
  REQUIRE(lines.size() == 8);
  int seen = 0;
  for (const Line& line : lines) {
    if (sg::testing::left_out(seen, 4)) continue;
    const sg::Costs costs{std::stod(line.at("TF")), std::stod(line.at("TB")), std::stod(line.at("TW")),
                          std::stod(line.at("Tcomm"))};
    const sg::ScheduleSpec spec{.ranks = std::stoi(line.at("p")), .microbatches = std::stoi(line.at("m"))};
    CAPTURE(line.at("model"), spec.ranks, spec.microbatches);
    CHECK(four_decimals(simulated(ScheduleKind::one_f_one_b, spec, costs).bubble_rate) == line.at("r_1F1B"));
    CHECK(four_decimals(simulated(ScheduleKind::zb_h1, spec, costs).bubble_rate) == line.at("r_ZBH1"));
    CHECK(four_decimals(simulated(ScheduleKind::zb_h1, spec, costs).bubble_rate) == line.at("r_ZB1p"));
    CHECK(four_decimals(simulated(ScheduleKind::zb_h2, spec, costs).bubble_rate) == line.at("r_ZBH2"));
  }
}

TEST_CASE("the length of a bubble follows its closed form", "[graphs][schedule][simulation]") {
  const int p     = GENERATE(1, 2, 3, 8);
  const int extra = GENERATE(0, 1, 5, 20);
  const auto [F, I, W] =
      GENERATE(table<double, double, double>({{1, 1, 1}, {2, 3, 1}, {3, 2, 2}, {1, 1, 0.25}, {7, 5, 0}}));
  static int seen = 0;
  if (sg::testing::left_out(seen, 3)) return;
  const sg::Costs costs{F, I, W, 0};
  CAPTURE(p, extra, F, I, W);
  const auto bubble = [&](ScheduleKind kind, int m, int chunks = 1) {
    const auto timeline = simulated(kind, {p, m, chunks}, costs);
    return timeline.longest_span - m * (F + I + W);
  };
  const double span = p - 1;
  CHECK(bubble(ScheduleKind::one_f_one_b, p + extra) == Approx(span * (F + I + W)).margin(1e-9));
  CHECK(bubble(ScheduleKind::gpipe, p + extra) == Approx(span * (F + I + W)).margin(1e-9));
  CHECK(bubble(ScheduleKind::zb_h1, p + extra) == Approx(span * (F + I - W)).margin(1e-9));
  CHECK(bubble(ScheduleKind::zb_h2, 2 * p - 1 + extra) == Approx(span * (F + I - 2 * W)).margin(1e-9));
  for (const int chunks : {1, 2, 3, 4})
    CHECK(bubble(ScheduleKind::interleaved, p * (1 + extra % 7), chunks) ==
          Approx(span * (F + I + W) / chunks).margin(1e-9));
  // Only one rank works at a time.
  CHECK(simulated(ScheduleKind::round_robin, {p, 1 + extra}, costs).makespan == Approx(p * (1 + extra) * (F + I + W)));
}

TEST_CASE("a transfer starts when its data is ready, and does not block computation",
          "[graphs][schedule][simulation]") {
  const auto schedule = sg::parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n");
  const auto timeline = sg::simulate(schedule, {.costs = {{.F = 2, .I = 2, .W = 1, .COMM = 0.5}}});
  //         0F0 0-2, 0F1 2-4;  1F0 2.5-4.5, 1B0 4.5-7.5, 1F1 7.5-9.5, 1B1 9.5-12.5;  0B0 8-11, 0B1 13-16
  CHECK(timeline.rows[0] == std::vector<sg::NodeTime>{{0, 2}, {2, 4}, {8, 11}, {13, 16}});
  CHECK(timeline.rows[1] == std::vector<sg::NodeTime>{{2.5, 4.5}, {4.5, 7.5}, {7.5, 9.5}, {9.5, 12.5}});
  CHECK(timeline.makespan == 16);
  CHECK(timeline.longest_span == 16);
  CHECK(timeline.bubble_rate == Approx(6.0 / 16));
  CHECK(timeline.peak_activation == std::vector<double>{2, 1});
  // Explicit transfers have their own times; nothing else changes.
  const auto lowered = sg::simulate(sg::with_send_recv(schedule), {.costs = {{.F = 2, .I = 2, .W = 1, .COMM = 0.5}}});
  CHECK(lowered.makespan == 16);
  CHECK(lowered.rows[0][1] == sg::NodeTime{2, 2.5});  // 0SEND_F0
  CHECK(lowered.rows[1][0] == sg::NodeTime{2, 2.5});  // 1RECV_F0
}

TEST_CASE("ranks may have different costs", "[graphs][schedule][simulation]") {
  const auto schedule = sg::pipeline_schedule(ScheduleKind::one_f_one_b, {.ranks = 2, .microbatches = 2});
  const auto timeline = sg::simulate(schedule, {.costs = {{1, 1, 0, 0.5}, {2, 3, 1, 0.25}}});
  CHECK(timeline.rows[1] == std::vector<sg::NodeTime>{{1.5, 3.5}, {3.5, 7.5}, {7.5, 9.5}, {9.5, 13.5}});
  CHECK(timeline.rows[0] == std::vector<sg::NodeTime>{{0, 1}, {1, 2}, {7.75, 8.75}, {13.75, 14.75}});
  CHECK(timeline.bubble_rate == Approx((14.75 - 12) / 14.75));  // the busiest rank works for 12
  CHECK(timeline.efficiency == Approx((4 + 12) / (2 * 14.75)));
}

TEST_CASE("invalid costs are refused", "[graphs][schedule][simulation][refuses]") {
  const auto schedule = sg::pipeline_schedule(ScheduleKind::one_f_one_b, {.ranks = 3, .microbatches = 2});
  const auto refused  = [&](const sg::ScheduleCosts& costs, const std::string& why) {
    CHECK_THROWS_MATCHES(sg::simulate(schedule, costs), sg::Error, MessageMatches(ContainsSubstring(why)));
  };
  refused({.costs = {}}, "0 costs for 3 ranks");
  refused({.costs = {{}, {}}}, "2 costs for 3 ranks");
  refused({.costs = {{1, -1, 1, 0}}}, "a cost of -1");
  refused({.costs = {{1, 1, 1, std::numeric_limits<double>::infinity()}}}, "a cost of inf");
  refused({.costs = {{0, 0, 0, 1}}}, "all cost 0");
  refused({.costs = {{}}, .retain = -0.5}, "retain -0.5 (0 to 1)");
}

TEST_CASE("a schedule of 64 stages and 1,024 microbatches is simulated", "[graphs][schedule][simulation]") {
  const int microbatches = sg::testing::cases(1024);
  const auto timeline    = simulated(ScheduleKind::zb_h1, {.ranks = 64, .microbatches = microbatches}, {1, 1, 1, 0});
  CHECK(timeline.longest_span == microbatches * 3 + 63);
  CHECK(timeline.makespan == timeline.longest_span);  // the longest span is that of the first rank
}

TEST_CASE("a drawing shows every action at its time", "[graphs][schedule][drawing]") {
  const auto schedule = sg::pipeline_schedule(ScheduleKind::one_f_one_b, {.ranks = 2, .microbatches = 3});
  const auto timeline = sg::simulate(schedule, {});
  CHECK(sg::gantt_text(schedule, timeline) ==
        "rank 0  F0 F1 ......B0--- F2 B1--- ...B2---\n"
        "rank 1  ...F0 B0--- F1 B1--- F2 B2--- ......\n");
  CHECK(sg::gantt_text(schedule, timeline, {.columns = 12}) ==  // too narrow for the number of an F
        "rank 0  FF..B0FB1.B2\n"
        "rank 1  .FB0FB1FB2..\n");
  const std::string colored = sg::gantt_text(schedule, timeline, {.color = true});
  CHECK_THAT(colored, ContainsSubstring("\x1b[48;5;111;30mF0 \x1b[0m"));
  CHECK_THROWS_AS(sg::gantt_text(schedule, timeline, {.columns = 3}), sg::Error);

  const std::string svg = sg::gantt_svg(schedule, timeline, "1f1b");
  CHECK_THAT(svg, ContainsSubstring("<title>1B2: 8 to 10</title>"));
  std::size_t bars = 0;
  for (std::size_t at = svg.find("<g>"); at != std::string::npos; at = svg.find("<g>", at + 1)) ++bars;
  CHECK(bars == schedule.num_actions());
  CHECK_THAT(sg::gantt_svg(schedule, timeline, "a&b<c>\x01\xff \xc3\xa9.csv"),
             ContainsSubstring(">a&amp;b&lt;c&gt;?? \xc3\xa9.csv</text>"));
  const auto chunks = sg::pipeline_schedule(ScheduleKind::gpipe, {.ranks = 1, .microbatches = 1, .chunks = 2});
  CHECK(sg::gantt_text(chunks, sg::simulate(chunks, {})) == "rank 0  0F0 1F0 1B0---- 0B0----\n");
}

TEST_CASE("costs may differ by stage, also for stages on the same rank", "[graphs][schedule]") {
  const auto two = sg::pipeline_schedule(sg::ScheduleKind::interleaved, {.ranks = 2, .microbatches = 4, .chunks = 2});
  const sg::Costs half{.F = 0.5, .I = 0.5, .W = 0.5};
  const auto even = sg::simulate(two, {.costs = {sg::Costs{}}}),
             each = sg::simulate(two, {.costs = {half, half, half, half}});
  CHECK(each.makespan == even.makespan);
  CHECK(each.bubble_rate == even.bubble_rate);

  // The last stage is expensive, like the head of a language model. Its rank is the busiest.
  const sg::Costs heavy{.F = 5, .I = 5, .W = 5};
  const auto head = sg::simulate(two, {.costs = {half, half, half, heavy}});
  CHECK(head.makespan > 4 * 15 + 4 * 1.5);
  CHECK(std::abs(head.bubble_rate - (1 - (4 * 15 + 4 * 1.5) / head.longest_span)) < 1e-12);

  const auto alone = sg::pipeline_schedule(sg::ScheduleKind::gpipe, {.ranks = 1, .microbatches = 3, .chunks = 2});
  const auto sum = sg::simulate(alone, {.costs = {{.F = 1, .I = 2, .W = 3, .COMM = 100}, {.F = 10, .I = 20, .W = 30}}});
  CHECK(sum.makespan == 3 * (6 + 60));
  CHECK(sum.bubble_rate == 0);
}
