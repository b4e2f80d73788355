// The schedules of the Zero Bubble paper (Qi et al., ICLR 2024), against the ones that are searched for.
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <fstream>
#include <map>
#include <sstream>

#include "engine/base/error.hpp"
#include "graphs/schedule/search.hpp"
#include "tests/support/paths.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/schedules/found_schedules.hpp"

namespace sg = stepgraph;
using Catch::Approx;
using sg::testing::check_found;

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

TEST_CASE("the search beats the printed rates of the Zero Bubble paper on seven of eight rows, or proves that none can",
          "[graphs][schedule][search]") {
  const auto rows = paper_rows();
  REQUIRE(rows.size() == 8);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (sg::testing::sanitized() && rows[i].p > 8) continue;
    CHECK(check_paper_row(rows[i]) == (i > 0));  // the first printed rate, 0.0433, is the bound
  }
}
