#include "graphs/schedule/validate.hpp"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <tuple>

#include "engine/base/error.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/lowering.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

// The message of validate for a schedule given as text.
std::string complaint(const std::string& text) {
  try {
    sg::validate(sg::parse_schedule(text));
  } catch (const sg::Error& error) {
    CHECK(error.kind() == sg::ErrorKind::config);
    return error.what();
  }
  return "none";
}

}  // namespace

TEST_CASE("validate names a flaw and marks its cell", "[graphs][schedule][validate][refuses]") {
  for (const auto& [text, why, mark] : {
           std::tuple{"0F0 0B0 0F0\n", "0F0 a second time", "[0F0]"},
           std::tuple{"0F0 0B0 0I0\n", "0I0: stage 0 has both B and I or W of microbatch 0", "[0I0]"},
           std::tuple{"0F0 0W0 0B0\n", "0B0: stage 0 has both B and I or W of microbatch 0", "[0B0]"},
           std::tuple{"0F0 0I0\n", "0W0 is missing on rank 0", "0I0 [missing]"},
           std::tuple{"0F0 0W0\n", "0I0 is missing on rank 0", "[missing]"},
           std::tuple{"0F0 0F1 0B1\n", "0B0 is missing on rank 0", "[missing]"},
           std::tuple{"0B0 0F1 0B1\n", "0F0 is missing on rank 0", "[missing]"},
           std::tuple{"0B0 0F0\n", "0B0 comes before 0F0, which it needs", "[0B0]"},
           std::tuple{"0F0 0W0 0I0\n", "0W0 comes before 0I0, which it needs", "[0W0]"},
           std::tuple{"1F0 0F0 1B0 0B0\n", "1F0 comes before 0F0, which it needs", "[1F0]"},
           std::tuple{"0F0 1F0 0B0 1B0\n", "0B0 comes before 1B0, which it needs", "[0B0]"},
           std::tuple{"0F0 0B0\n0F1 0B1\n", "0F1 on rank 1: stage 0 is on rank 0", "[0F1]"},
           std::tuple{"0F0 0B0 2F0 2B0\n", "no rank has stage 1 of 3", "no rank"},
           std::tuple{"0F0 0F1 0B0 0B1\n1F0 1F1 1B1\n", "1B0 is missing on rank 1", "[missing]"},
           std::tuple{"0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n",
                      "ranks wait for each other: rank 0 at 0B0 for 1B0; rank 1 at 1F1 for 0F1", "[1F1]"},
           std::tuple{"0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0\n", "0RECV_B0 is missing on rank 0", "[missing]"},
           std::tuple{"0F0 0SEND_F0 0B0 0RECV_B0\n1RECV_F0 1F0 1B0 1SEND_B0\n",
                      "0B0 comes before 0RECV_B0, which it needs", "[0B0]"},
           std::tuple{"0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0\n",
                      "0SEND_F0 comes before 0F0, which it needs", "[0SEND_F0]"},
           std::tuple{"0RECV_B0 0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0\n",
                      "ranks wait for each other: rank 0 at 0RECV_B0 for 1SEND_B0; rank 1 at 1RECV_F0 for 0SEND_F0",
                      "[1RECV_F0]"},
           std::tuple{"0F0 0SEND_F0 0B0\n", "0SEND_F0: there is no neighbouring stage on another rank", "[0SEND_F0]"},
           std::tuple{"0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
                      "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1\n",
                      "1RECV_F1 is received when microbatch 0 is sent", "[1RECV_F1]"},
           std::tuple{"0UNSHARD 0F0 0RESHARD 0B0\n", "0B0 needs the gathered weights of stage 0 (after 0UNSHARD)",
                      "[0B0]"},
           std::tuple{"0UNSHARD 0UNSHARD 0F0 0B0\n", "the weights are already gathered", "[0UNSHARD]"},
           std::tuple{"0F0 0F1 0B0 0REDUCE_GRAD 0B1\n", "0REDUCE_GRAD after 1 of 2 microbatches", "[0REDUCE_GRAD]"},
           std::tuple{"0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD\n", "0REDUCE_GRAD a second time", "[0REDUCE_GRAD]"},
       }) {
    CAPTURE(text);
    CHECK_THAT(complaint(text), ContainsSubstring(why) && ContainsSubstring(mark));
  }
  CHECK_THAT(complaint("0F0 0F30 0B0 0B30\n" + std::string(40, '\n')), ContainsSubstring("microbatch 30"));
  CHECK_THROWS_MATCHES(sg::validate({}), sg::Error, MessageMatches(ContainsSubstring("no ranks")));
}

TEST_CASE("only the part of the grid around the bad cell is shown", "[graphs][schedule][validate]") {
  sg::PipelineSchedule schedule =
      sg::pipeline_schedule(sg::ScheduleKind::one_f_one_b, {.ranks = 16, .microbatches = 64});
  std::swap(schedule.rows[8][20], schedule.rows[8][40]);  // a backward that comes ten microbatches too early
  const auto flaw = sg::find_flaw(schedule);
  REQUIRE(flaw);
  CHECK(flaw->cells == std::vector<sg::Cell>{{8, 20}});
  CHECK(
      sg::grid_text(schedule, flaw->cells) ==
      "    ...\n"
      "    rank 6   ... (15)   6F12   6B3    6F13   6B4    6F14   6B5    6F15   6B6    6F16   6B7    6F17   ... (102)\n"
      "    rank 7   ... (15)   7B3    7F12   7B4    7F13   7B5    7F14   7B6    7F15   7B7    7F16   7B8    ... (102)\n"
      "    rank 8   ... (15)   8F11   8B4    8F12   8B5    8F13  [8B16]  8F14   8B7    8F15   8B8    8F16   ... (102)\n"
      "    rank 9   ... (15)   9B4    9F11   9B5    9F12   9B6    9F13   9B7    9F14   9B8    9F15   9B9    ... (102)\n"
      "    rank 10  ... (15)   10F10  10B5   10F11  10B6   10F12  10B7   10F13  10B8   10F14  10B9   10F15  ... (102)\n"
      "    ...\n");
}

TEST_CASE("stages may be placed on ranks in any way", "[graphs][schedule][validate]") {
  // Two ranks and four stages in a V: rank 0 has the first and the last stage.
  const auto v = sg::parse_schedule("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1\n");
  CHECK_NOTHROW(sg::validate(v));
  CHECK(sg::to_string(sg::with_send_recv(v)).find("SEND_F") != std::string::npos);
  CHECK(sg::to_string(sg::with_send_recv(v)).find("1SEND_F") == std::string::npos);  // stages 1 and 2 share a rank
}

TEST_CASE("weight gradients out of microbatch order are reported, not refused", "[graphs][schedule][validate]") {
  CHECK(sg::validate(sg::parse_schedule("0F0 0F1 0I1 0I0 0W0 0W1\n")).weights_in_order);
  CHECK_FALSE(sg::validate(sg::parse_schedule("0F0 0F1 0I0 0I1 0W1 0W0\n")).weights_in_order);
  CHECK_FALSE(sg::validate(sg::parse_schedule("0F0 0F1 0B1 0B0\n")).weights_in_order);
  CHECK_FALSE(sg::validate(sg::parse_schedule("0F0 0B0\n")).has_transfers);
}

TEST_CASE("a missing stage and an idle rank are refused", "[graphs][schedule][validate]") {
  CHECK_THROWS_WITH(
      sg::validate(sg::parse_schedule("0F0 0B0 2F0 2B0\n")),
      Catch::Matchers::ContainsSubstring("no rank has stage 1 of 3") && Catch::Matchers::ContainsSubstring("[2F0]"));
  sg::PipelineSchedule idle = sg::parse_schedule("0F0 0B0\n");
  idle.rows.emplace_back();
  CHECK_THROWS_WITH(sg::validate(idle), Catch::Matchers::ContainsSubstring("rank 1 does nothing"));
}

TEST_CASE("a schedule with too many stages and microbatches is refused", "[graphs][schedule][validate]") {
  sg::PipelineSchedule large{.rows             = std::vector<std::vector<sg::Action>>(1),
                             .rank_of_stage    = {sg::Rank{0}},
                             .num_microbatches = static_cast<int>(sg::max_stage_microbatches) + 1};
  for (int mb = 0; mb < large.num_microbatches; ++mb)
    large.rows[0].push_back({sg::Stage{0}, sg::ActionKind::forward, sg::Microbatch{mb}});
  CHECK_THROWS_WITH(sg::validate(large), Catch::Matchers::ContainsSubstring(
                                             "1 stages x 2097153 microbatches are too many (at most 2^21 in all)"));
}
