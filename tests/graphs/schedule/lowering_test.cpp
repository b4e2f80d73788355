#include "graphs/schedule/lowering.hpp"

#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "engine/base/error.hpp"
#include "engine/graph/edges.hpp"
#include "engine/verify/verify.hpp"
#include "graphs/schedule/graph.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/validate.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using sg::ScheduleKind;

TEST_CASE("a send follows the action that makes its data, and receives come in the order of sends",
          "[graphs][schedule][lowering]") {
  const auto schedule = sg::pipeline_schedule(ScheduleKind::one_f_one_b, {.ranks = 2, .microbatches = 2});
  const auto before   = schedule;
  CHECK(sg::to_string(sg::with_send_recv(schedule)) ==
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1\n");
  CHECK(schedule == before);
  const auto zb = sg::pipeline_schedule(ScheduleKind::zb_h1, {.ranks = 2, .microbatches = 1});
  CHECK(sg::to_string(sg::with_send_recv(zb)) ==
        "0F0 0SEND_F0 0RECV_B0 0I0 0W0\n"
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0\n");
}

TEST_CASE("a single rank sends nothing, for any number of stages", "[graphs][schedule][lowering]") {
  const auto schedule = sg::pipeline_schedule(ScheduleKind::gpipe, {.ranks = 1, .microbatches = 3, .chunks = 4});
  CHECK(sg::with_send_recv(schedule) == schedule);
}

TEST_CASE("weights are gathered before their first use, and dropped when other stages need the room",
          "[graphs][schedule][lowering]") {
  const auto schedule = sg::pipeline_schedule(ScheduleKind::gpipe, {.ranks = 1, .microbatches = 2, .chunks = 3});
  // All three stages fit at once. Each is dropped after its last use.
  CHECK(sg::to_string(sg::with_unshard(schedule, 3)) ==
        "0UNSHARD 1UNSHARD 2UNSHARD 0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 2RESHARD 1B0 1B1 1RESHARD 0B0 0B1 0RESHARD\n");
  const auto two = sg::with_unshard(schedule, 2);
  CHECK(sg::to_string(two) ==
        "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 1F0 1F1 2F0 2F1 2B0 2B1 2RESHARD 0UNSHARD 1B0 1B1 "
        "1RESHARD 0B0 0B1 0RESHARD\n");
  CHECK_NOTHROW(sg::validate(two));
  CHECK_THROWS_MATCHES(sg::with_unshard(schedule, 0), sg::Error, MessageMatches(ContainsSubstring("at least 1")));
}

TEST_CASE("gradients are reduced after a stage's last weight gradient", "[graphs][schedule][lowering]") {
  const auto schedule = sg::pipeline_schedule(ScheduleKind::gpipe, {.ranks = 1, .microbatches = 2, .chunks = 2});
  CHECK(sg::to_string(sg::with_reduce_grad(schedule)) == "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD\n");
}

TEST_CASE("all passes together give a valid schedule and a sound graph", "[graphs][schedule][lowering]") {
  for (const ScheduleKind kind : sg::all_schedule_kinds) {
    CAPTURE(kind);
    const int chunks   = kind == ScheduleKind::interleaved || kind == ScheduleKind::gpipe ? 4 : 0;
    const auto lowered = sg::with_send_recv(sg::with_reduce_grad(
        sg::with_unshard(sg::pipeline_schedule(kind, {.ranks = 3, .microbatches = 6, .chunks = chunks}), 2)));
    CHECK(sg::validate(lowered).has_transfers);
    const sg::ScheduleGraph built = sg::schedule_graph(lowered, {sg::Costs{}});
    CHECK_NOTHROW(sg::verify(built.graph));
    // The reduction of a stage's gradients comes after its last weight gradient.
    for (std::size_t rank = 0; rank < 3; ++rank) {
      for (std::size_t i = 0; i < lowered.rows[rank].size(); ++i) {
        if (lowered.rows[rank][i].kind != sg::ActionKind::reduce_grad) continue;
        for (std::size_t j = 0; j < lowered.rows[rank].size(); ++j) {
          const sg::Action& other = lowered.rows[rank][j];
          if (other.stage != lowered.rows[rank][i].stage) continue;
          if (other.kind != sg::ActionKind::backward && other.kind != sg::ActionKind::weight_gradient) continue;
          CHECK(sg::reaches(built.graph, built.nodes[rank][j], built.nodes[rank][i]));
        }
      }
    }
  }
}

TEST_CASE("a pass refuses a schedule that has its actions already or cannot run",
          "[graphs][schedule][lowering][refuses]") {
  const auto schedule = sg::pipeline_schedule(ScheduleKind::one_f_one_b, {.ranks = 2, .microbatches = 2});
  CHECK_THROWS_MATCHES(sg::with_send_recv(sg::with_send_recv(schedule)), sg::Error,
                       MessageMatches(ContainsSubstring("has 0SEND_F0 already")));
  CHECK_THROWS_MATCHES(sg::with_unshard(sg::with_unshard(schedule)), sg::Error,
                       MessageMatches(ContainsSubstring("has 0UNSHARD already")));
  CHECK_THROWS_MATCHES(sg::with_reduce_grad(sg::with_reduce_grad(schedule)), sg::Error,
                       MessageMatches(ContainsSubstring("has 0REDUCE_GRAD already")));
  const auto bad = sg::parse_schedule("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n");
  for (const auto pass : {+[](const sg::PipelineSchedule& s) { return sg::with_send_recv(s); },
                          +[](const sg::PipelineSchedule& s) { return sg::with_unshard(s); },
                          +[](const sg::PipelineSchedule& s) { return sg::with_reduce_grad(s); }})
    CHECK_THROWS_MATCHES(pass(bad), sg::Error, MessageMatches(ContainsSubstring("wait for each other")));
}

TEST_CASE("a rank receives messages of both neighbours in the order in which they are sent",
          "[graphs][schedule][lowering]") {
  // On rank 1 of zb-v, the input of stage 1 and the input of stage 6 come from different ranks. The fifth microbatch
  // leaves stage 0 at 5, the first leaves stage 5 at 6: ranks 0 to 3 and back are six forwards.
  const auto lowered = sg::with_send_recv(sg::pipeline_schedule(ScheduleKind::zb_v, {.ranks = 4, .microbatches = 8}));
  const auto& row    = lowered.rows[1];
  const auto at      = [&](const char* action) {
    return std::find(row.begin(), row.end(), sg::parse_action(action)) - row.begin();
  };
  CHECK(at("1RECV_F4") < at("6RECV_F0"));
  CHECK(at("6RECV_F0") < at("1RECV_F6"));
  // A queue of receives then holds nothing up: a step of equal actions has no bubble.
  CHECK_NOTHROW(sg::validate(lowered));
}
