#include "graphs/schedule/search/bound.hpp"

#include <algorithm>
#include <array>

#include "tests/support/schedules/search_tests.hpp"

namespace sg = stepgraph;
using namespace sg::testing::search_tests;

namespace {

// All orders of F, I and W of one rank, in which the microbatches of a stage run in order.
void all_rows(const Setting& setting, std::array<int, 6> count, std::vector<sg::search::Letter>& now,
              std::vector<std::vector<sg::search::Letter>>& out) {
  if (std::ssize(now) == setting.row_length()) return out.push_back(now);
  for (std::size_t letter = 0; letter < 3 * static_cast<std::size_t>(setting.chunks); ++letter) {
    if (count[letter] == setting.microbatches || (letter % 3 > 0 && count[letter] == count[letter - 1])) continue;
    ++count[letter];
    now.push_back(static_cast<sg::search::Letter>(letter));
    all_rows(setting, count, now, out);
    now.pop_back();
    --count[letter];
  }
}

// The least span of all schedules, by trying each.
double least_span(const Setting& setting) {
  std::vector<std::vector<sg::search::Letter>> of_rank;
  std::vector<sg::search::Letter> none;
  all_rows(setting, {}, none, of_rank);
  RowTimer timer(setting);
  double least = sg::search::never;
  std::vector<std::size_t> choice(static_cast<std::size_t>(setting.ranks), 0);
  for (bool more = true; more;) {
    Rows rows{.length = setting.row_length()};
    for (const std::size_t i : choice) rows.letters.insert(rows.letters.end(), of_rank[i].begin(), of_rank[i].end());
    if (fits(setting, rows) && timer.set(rows)) least = std::min(least, timer.longest_span());
    more = false;
    for (std::size_t& i : choice) {
      if (++i < of_rank.size()) {
        more = true;
        break;
      }
      i = 0;
    }
  }
  return least;
}

}  // namespace

TEST_CASE("the bound of spans is below every schedule of small pipelines, and often reached",
          "[graphs][schedule][search]") {
  std::mt19937_64 random(26);
  int reached     = 0;
  const int count = sg::testing::cases(150);
  for (int i = 0; i < count; ++i) {
    Setting setting = random_setting(random, 3, 2, 2);
    if (setting.chunks == 2) {  // 20 orders of a rank with one microbatch, 23,100 with two
      setting.microbatches = setting.ranks == 1 && i % 8 == 0 ? 2 : 1;
    } else if (setting.ranks < 3) {
      setting.microbatches = draw(random, 1, 3);
    }
    if (draw(random, 0, 2) > 0) {
      for (sg::Costs& cost : setting.costs) cost = setting.costs.front();
    }
    CAPTURE(i, setting.ranks, setting.chunks, setting.microbatches, setting.limit, setting.retain);
    const double bound = sg::search::span_bound(setting).span, least = least_span(setting);
    CHECK(bound <= least * (1 + 1e-9));
    reached += bound >= least * (1 - 1e-9);
    sg::search::SpanBound needs;
    CHECK(sg::search::needs_of_span(setting, least * (1 + 1e-9), needs));
  }
  CHECK(reached >= count / 3);
}
