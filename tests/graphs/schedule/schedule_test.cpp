#include "graphs/schedule/schedule.hpp"

#include <sys/stat.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <tuple>

#include "engine/base/error.hpp"
#include "graphs/schedule/csv.hpp"
#include "graphs/schedule/kinds.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

TEST_CASE("every kind of action prints and parses back", "[graphs][schedule]") {
  for (std::size_t kind = 0; kind < sg::num_action_kinds; ++kind) {
    sg::Action action{sg::Stage{12}, static_cast<sg::ActionKind>(kind), sg::no_microbatch};
    if (sg::has_microbatch(action.kind)) action.microbatch = sg::Microbatch{345};
    CAPTURE(sg::to_string(action));
    CHECK(sg::parse_action(sg::to_string(action)) == action);
  }
  CHECK(sg::to_string({sg::Stage{2}, sg::ActionKind::forward, sg::Microbatch{0}}) == "2F0");
  CHECK(sg::to_string({sg::Stage{3}, sg::ActionKind::recv_backward, sg::Microbatch{7}}) == "3RECV_B7");
  CHECK(sg::to_string({sg::Stage{1}, sg::ActionKind::reduce_grad}) == "1REDUCE_GRAD");
}

TEST_CASE("text that is not an action is refused with the reason", "[graphs][schedule][refuses]") {
  for (const auto& [text, why] :
       {std::pair{"2F0junk", "'junk' follows the action"}, std::pair{"", "no stage"}, std::pair{"F0", "no stage"},
        std::pair{"2F", "no microbatch"}, std::pair{"2", "unknown action ''"}, std::pair{"2f0", "unknown action 'f'"},
        std::pair{"2SEND_X0", "unknown action 'SEND_X'"}, std::pair{"-1F0", "no stage"}, std::pair{"+1F0", "no stage"},
        std::pair{"1F-1", "unknown action 'F-'"}, std::pair{"1UNSHARD0", "'0' follows the action"},
        std::pair{"99999999999F0", "too large"}, std::pair{"0F99999999999", "too large"},
        std::pair{"0F0 ", "' ' follows the action"}, std::pair{"(0F1;1B0)OVERLAP_F_B", "overlapped"}}) {
    CAPTURE(text);
    CHECK_THROWS_MATCHES(sg::parse_action(text), sg::Error, MessageMatches(ContainsSubstring(why)));
  }
}

TEST_CASE("the rows of a schedule define its stages, ranks and microbatches", "[graphs][schedule]") {
  const auto schedule = sg::parse_schedule("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0\n");  // in a V: stage 3 is on rank 0
  CHECK(schedule.num_ranks() == 2);
  CHECK(schedule.num_microbatches == 1);
  CHECK(schedule.rank_of_stage == std::vector{sg::Rank{0}, sg::Rank{1}, sg::Rank{1}, sg::Rank{0}});
  CHECK(schedule.stages_per_rank() == std::vector{2, 2});
  CHECK(sg::parse_schedule("0F0 2F0 0B0\n").rank_of_stage == std::vector{sg::Rank{0}, sg::Rank{-1}, sg::Rank{0}});
}

TEST_CASE("junk in a schedule's text is refused with row, column and reason", "[graphs][schedule][refuses]") {
  CHECK_THROWS_MATCHES(
      sg::parse_schedule("0F0 0B0\n1F0 1B0x"), sg::Error,
      MessageMatches(ContainsSubstring("row 2, column 2") && ContainsSubstring("'x' follows the action")));
  CHECK_THROWS_MATCHES(sg::parse_schedule("0F0 900000000B0"), sg::Error,
                       MessageMatches(ContainsSubstring("row 1, column 2") && ContainsSubstring("stage 900000000")));
  CHECK_THROWS_MATCHES(sg::parse_schedule("0F0 0B900000000"), sg::Error,
                       MessageMatches(ContainsSubstring("microbatch 900000000")));
}

TEST_CASE("the CSV of torch.distributed.pipelining is read, including idle slots", "[graphs][schedule][csv]") {
  // 1F1B of two ranks as torch's `_dump_csv` writes it: None is an empty cell, and lines end in \r\n.
  const auto schedule = sg::parse_csv("0F0,0F1,,0B0,,0B1\r\n,1F0,1B0, 1F1 ,1B1,\r\n");
  CHECK(schedule == sg::pipeline_schedule(sg::ScheduleKind::one_f_one_b, {.ranks = 2, .microbatches = 2}));
  CHECK(sg::to_csv(schedule) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  const auto lowered = sg::parse_csv("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0I0,0W0,0RESHARD,0REDUCE_GRAD\n1RECV_F0,1F0");
  CHECK(lowered.rows[0][1] == sg::parse_action("0F0"));
  CHECK(lowered.rows[0].size() == 8);
  CHECK(lowered.rows[1].size() == 2);
}

TEST_CASE("junk in a CSV is refused with row, column and reason", "[graphs][schedule][csv][refuses]") {
  for (const auto& [text, place, why] :
       {std::tuple{"0F0,0B0\n1F0,,2F0junk\n", "row 2, column 3", "'junk'"},
        std::tuple{"0F0;0B0\n", "row 1, column 1", "';0B0'"}, std::tuple{"0F0,\"0B0\n", "row 1, column 2", "no stage"},
        std::tuple{"step,0F0\n", "row 1, column 1", "no stage"},
        std::tuple{"0F0,77B0\n", "row 1, column 2", "stage 77"}}) {
    CAPTURE(text);
    CHECK_THROWS_MATCHES(sg::parse_csv(text), sg::Error,
                         MessageMatches(ContainsSubstring(place) && ContainsSubstring(why)));
  }
  CHECK_THROWS_MATCHES(sg::parse_csv(""), sg::Error, MessageMatches(ContainsSubstring("no rows")));
  CHECK_THROWS_MATCHES(sg::read_csv("/nowhere/at/all.csv"), sg::Error,
                       MessageMatches(ContainsSubstring("/nowhere/at/all.csv")));
}

TEST_CASE("only a regular file of some size is read as a CSV", "[graphs][schedule][csv][refuses]") {
  const sg::testing::TempFolder folder;
  const auto refused = [&](const char* name, const std::string& why) {
    CHECK_THROWS_WITH(sg::read_csv((folder / name).string()), Catch::Matchers::ContainsSubstring(why));
  };
  REQUIRE(::mkfifo((folder / "pipe.csv").c_str(), 0600) == 0);
  refused("pipe.csv", "is not a regular file");  // and does not wait for a writer
  folder.put("large.csv", "");
  std::filesystem::resize_file(folder / "large.csv", (64 << 20) + 1);  // a hole: takes no space
  refused("large.csv", "has 67108865 bytes (at most 67108864)");
  CHECK_THROWS_WITH(sg::read_csv("/dev/zero"), Catch::Matchers::ContainsSubstring("is not a regular file"));
}

TEST_CASE("a CSV may have a byte order mark, quotes and blank lines at its end, but no empty row",
          "[graphs][schedule][csv]") {
  const auto plain = sg::parse_csv("0F0,0B0\n1F0,1B0\n");
  CHECK(sg::parse_csv("\xef\xbb\xbf\"0F0\" , \"0B0\"\r\n1F0,,1B0\r\n\n \n") == plain);
  const auto refused = [](const char* text, const std::string& why) {
    CHECK_THROWS_WITH(sg::parse_csv(text), Catch::Matchers::ContainsSubstring(why));
  };
  refused("0F0,0B0\n\n1F0,1B0\n", "row 2 is empty (a row of actions for each rank)");
  refused("0F0,,,9F0\n", "row 1, column 4: '9F0': stage 9");
  refused("", "no rows");
}
