#include "graphs/schedule/graph.hpp"

#include <catch2/catch_test_macros.hpp>
#include <map>

#include "engine/verify/verify.hpp"
#include "graphs/schedule/kinds.hpp"
#include "graphs/schedule/lowering.hpp"

namespace sg = stepgraph;
using sg::ActionKind;
using sg::ScheduleKind;

namespace {

// Whether `after` reads something that `before` writes.
bool feeds(const sg::Graph& graph, sg::Node before, sg::Node after) {
  for (std::size_t i = 0; i < graph.num_accesses(before); ++i) {
    for (std::size_t j = 0; j < graph.num_accesses(after); ++j) {
      const auto from = graph.access(before, i), to = graph.access(after, j);
      if (from.buffer == to.buffer && sg::writes(from.mode) && sg::reads(to.mode)) return true;
    }
  }
  return false;
}

}  // namespace

TEST_CASE("tokens connect each action to the actions it depends on, not only the order of a lane",
          "[graphs][schedule]") {
  for (const ScheduleKind kind : {ScheduleKind::zb_h1, ScheduleKind::interleaved}) {
    const int chunks = kind == ScheduleKind::interleaved ? 2 : 1;
    const auto lowered =
        sg::with_send_recv(sg::pipeline_schedule(kind, {.ranks = 2, .microbatches = 4, .chunks = chunks}));
    const auto built    = sg::schedule_graph(lowered, {sg::Costs{}});
    const bool is_split = kind == ScheduleKind::zb_h1;
    std::map<sg::Action, sg::Node> nodes;
    for (std::size_t rank = 0; rank < lowered.rows.size(); ++rank) {
      for (std::size_t i = 0; i < lowered.rows[rank].size(); ++i) nodes[lowered.rows[rank][i]] = built.nodes[rank][i];
    }
    REQUIRE(nodes.size() == built.graph.num_nodes());
    for (const auto& [action, node] : nodes) {
      CAPTURE(sg::to_string(action));
      const int stage = sg::index(action.stage), last = lowered.num_stages() - 1;
      const auto fed_by = [&, what = action, to = node](int from, ActionKind made) {
        CHECK(feeds(built.graph, nodes.at({sg::Stage{from}, made, what.microbatch}), to));
      };
      CHECK(built.graph.name(node) == sg::to_string(action));
      CHECK(built.graph.has_part(node) == sg::is_transfer(action.kind));
      CHECK(built.graph.lane(node).has_value() == sg::is_compute(action.kind));
      switch (action.kind) {
        case ActionKind::forward:
          if (stage > 0) fed_by(stage, ActionKind::recv_forward);
          break;
        case ActionKind::input_gradient:
        case ActionKind::backward:
          fed_by(stage, ActionKind::forward);
          if (stage < last) fed_by(stage, ActionKind::recv_backward);
          break;
        case ActionKind::weight_gradient:
          fed_by(stage, ActionKind::input_gradient);
          break;
        case ActionKind::send_forward:
          fed_by(stage, ActionKind::forward);
          break;
        case ActionKind::send_backward:
          fed_by(stage, is_split ? ActionKind::input_gradient : ActionKind::backward);
          break;
        default:
          break;
      }
    }
    CHECK_NOTHROW(sg::verify(built.graph));
  }
}

TEST_CASE("stages on the same rank exchange no messages", "[graphs][schedule]") {
  const auto schedule = sg::parse_schedule("0F0 3F0 3B0 0B0\n1F0 2F0 2I0 1B0 2W0\n");
  const auto built    = sg::schedule_graph(schedule, {sg::Costs{}});
  CHECK(built.graph.num_nodes() == 9 + 8);  // stages 0 to 1 and 2 to 3, and back: four messages of two parts each
  CHECK(feeds(built.graph, built.nodes[1][0], built.nodes[1][1]));
  CHECK(feeds(built.graph, built.nodes[1][2], built.nodes[1][3]));
  CHECK_NOTHROW(sg::verify(built.graph));
}
