#include "graphs/schedule/graph.hpp"

#include <algorithm>

#include "engine/base/error.hpp"
#include "graphs/schedule/lowering.hpp"
#include "graphs/schedule/validate.hpp"

namespace stepgraph {
namespace {

using Kind = ActionKind;

constexpr double most_cost = 1e100;  // so that no sum of them is infinite

class Builder {
 public:
  Builder(const PipelineSchedule& lowered, const std::vector<Costs>& costs)
      : schedule_(lowered), costs_(costs), graph_(lowered.num_ranks()) {
    const auto size = static_cast<std::size_t>(lowered.num_stages()) * microbatches();
    for (auto* tokens : {&input_, &output_, &gradient_in_, &gradient_}) tokens->resize(size);
    weights_.resize(static_cast<std::size_t>(lowered.num_stages()));
    sums_.resize(weights_.size());
    for (int stage = 0; stage + 1 < lowered.num_stages(); ++stage) {
      forward_.push_back(crossing(stage, stage + 1, "F"));
      backward_.push_back(crossing(stage + 1, stage, "B"));
    }
    for (const auto& row : lowered.rows) {
      for (const Action& action : row) {
        has_unshard_ |= action.kind == Kind::unshard;
        has_reduce_ |= action.kind == Kind::reduce_grad;
      }
    }
  }

  // `given`: the schedule before it got transfers; its actions are found again in their order.
  ScheduleGraph build(const PipelineSchedule& given) {
    ScheduleGraph result;
    result.nodes.resize(given.rows.size());
    for (std::size_t rank = 0; rank < schedule_.rows.size(); ++rank) {
      auto& nodes = result.nodes[rank];
      nodes.reserve(given.rows[rank].size());
      for (const Action& action : schedule_.rows[rank]) {
        const Node node = add(Rank{static_cast<int>(rank)}, action);
        if (nodes.size() < given.rows[rank].size() && given.rows[rank][nodes.size()] == action) nodes.push_back(node);
      }
    }
    result.graph = std::move(graph_);
    return result;
  }

 private:
  [[nodiscard]] std::size_t microbatches() const { return static_cast<std::size_t>(schedule_.num_microbatches); }
  [[nodiscard]] Rank rank_of(int stage) const { return schedule_.rank_of_stage[static_cast<std::size_t>(stage)]; }

  // The communicator from one stage to a neighbour; none when they share a rank.
  Group crossing(int from, int to, std::string_view what) {
    if (rank_of(from) == rank_of(to)) return {};
    return graph_.group({.name = str(what, " stage", from, " to stage", to), .ranks = {rank_of(from), rank_of(to)}});
  }

  // The token of a stage and microbatch. Its writer comes before its readers and makes it.
  Buffer make(std::vector<Buffer>& tokens, Rank rank, int stage, Microbatch microbatch, std::string_view name) {
    return tokens[at(stage, microbatch)] = graph_.token(rank, str(stage, name, index(microbatch)));
  }
  [[nodiscard]] std::size_t at(int stage, Microbatch microbatch) const {
    return static_cast<std::size_t>(stage) * microbatches() + static_cast<std::size_t>(index(microbatch));
  }

  Buffer of_stage(std::vector<Buffer>& tokens, Rank rank, Stage stage, std::string_view name) {
    Buffer& token = tokens[static_cast<std::size_t>(index(stage))];
    if (token == Buffer{}) token = graph_.token(rank, str(name, stage));
    return token;
  }

  Node add(Rank rank, const Action& action) {
    if (is_compute(action.kind)) return add_compute(rank, action);
    if (is_transfer(action.kind)) return add_transfer(rank, action);
    NodeSpec spec{.name = to_string(action), .kind = NodeKind::communicate, .labels = {.stage = index(action.stage)}};
    if (action.kind == Kind::reduce_grad) {
      spec.lane  = Lane{rank, LaneKind::reduce};
      spec.reads = of_stage(sums_, rank, action.stage, "gradients of stage ");
    } else {
      spec.lane   = Lane{rank, LaneKind::gather};
      spec.writes = of_stage(weights_, rank, action.stage, "weights of stage ");
    }
    return graph_.add(spec);
  }

  Node add_compute(Rank rank, const Action& action) {
    const int stage     = index(action.stage);
    const int last      = schedule_.num_stages() - 1;
    const Microbatch mb = action.microbatch;
    const std::size_t i = at(stage, mb);
    const Costs& costs  = costs_[static_cast<std::size_t>(stage)];
    NodeSpec spec{
        .name = to_string(action), .lane = Lane{rank, LaneKind::compute}, .labels = {stage, index(mb), -1, {}}};
    switch (action.kind) {
      case Kind::forward:
        if (stage > 0) spec.reads.push_back(rank_of(stage - 1) == rank ? output_[at(stage - 1, mb)] : input_[i]);
        spec.writes       = make(output_, rank, stage, mb, " output ");
        spec.cost.flops   = costs.F;
        spec.labels.phase = "forward";
        break;
      case Kind::input_gradient:
      case Kind::backward:
        spec.reads.push_back(output_[i]);
        if (stage < last)
          spec.reads.push_back(rank_of(stage + 1) == rank ? gradient_[at(stage + 1, mb)] : gradient_in_[i]);
        spec.writes       = make(gradient_, rank, stage, mb, " gradient ");
        spec.cost.flops   = action.kind == Kind::backward ? costs.I + costs.W : costs.I;
        spec.labels.phase = "backward";
        break;
      default:
        spec.reads        = gradient_[i];
        spec.cost.flops   = costs.W;
        spec.labels.phase = "weights";
        break;
    }
    if (has_unshard_) spec.reads.push_back(of_stage(weights_, rank, action.stage, "weights of stage "));
    if (has_reduce_ && (action.kind == Kind::weight_gradient || action.kind == Kind::backward))
      spec.writes.push_back(of_stage(sums_, rank, action.stage, "gradients of stage "));
    return graph_.add(spec);
  }

  // The sender's cost is the transfer's time. A receive waits for nothing of its own rank.
  Node add_transfer(Rank rank, const Action& action) {
    const int stage     = index(action.stage);
    const Microbatch mb = action.microbatch;
    const bool sends    = action.kind == Kind::send_forward || action.kind == Kind::send_backward;
    const bool forward  = action.kind == Kind::send_forward || action.kind == Kind::recv_forward;
    const int other = action.kind == Kind::send_forward || action.kind == Kind::recv_backward ? stage + 1 : stage - 1;
    const auto boundary = static_cast<std::size_t>(std::min(stage, other));
    NodeSpec spec{.name   = to_string(action),
                  .kind   = NodeKind::communicate,
                  .labels = {stage, index(mb), -1, forward ? "forward" : "backward"}};
    spec.part = PartSpec{.group   = forward ? forward_[boundary] : backward_[boundary],
                         .op      = sends ? PartOp::send : PartOp::recv,
                         .type    = DType::u8,
                         .peer    = rank_of(other),
                         .message = str(forward ? "F" : "B", index(mb))};
    if (sends) {
      spec.reads      = (forward ? output_ : gradient_)[at(stage, mb)];
      spec.cost.flops = costs_[static_cast<std::size_t>(stage)].COMM;
    } else {
      spec.writes =
          forward ? make(input_, rank, stage, mb, " input ") : make(gradient_in_, rank, stage, mb, " d_output ");
    }
    return graph_.add(spec);
  }

  const PipelineSchedule& schedule_;
  const std::vector<Costs>& costs_;  // [stage]
  Graph graph_;
  std::vector<Buffer> input_, output_, gradient_in_, gradient_;  // [stage x microbatch]
  std::vector<Buffer> weights_, sums_;                           // [stage]
  std::vector<Group> forward_, backward_;                        // [stage]: between it and the next
  bool has_unshard_ = false, has_reduce_ = false;
};

}  // namespace

std::vector<Costs> stage_costs(const PipelineSchedule& schedule, const std::vector<Costs>& costs) {
  const auto ranks = schedule.rows.size(), stages = schedule.rank_of_stage.size();
  if (costs.size() != 1 && costs.size() != ranks && costs.size() != stages) {
    throw Error(ErrorKind::config, str("schedule: ", costs.size(), " costs for ", ranks, " ranks and ", stages,
                                       " stages (one for all, one for each rank, or one for each stage)"));
  }
  for (const Costs& cost : costs) {
    for (const double time : {cost.F, cost.I, cost.W, cost.COMM}) {
      if (!(time >= 0) || !(time <= most_cost))
        throw Error(ErrorKind::config, str("schedule: a cost of ", time, " (0 to ", most_cost, ")"));
    }
    if (!(cost.F + cost.I + cost.W > 0))
      throw Error(ErrorKind::config, "schedule: F, I and W all cost 0 (at least one above 0)");
  }
  const std::vector<int> chunks = schedule.stages_per_rank();
  const bool whole              = costs.size() == stages && stages != ranks;
  std::vector<Costs> out;
  for (std::size_t stage = 0; stage < stages; ++stage) {
    const int rank = index(schedule.rank_of_stage[stage]);
    Costs cost     = costs[costs.size() == 1        ? 0
                           : costs.size() == stages ? stage
                                                    : static_cast<std::size_t>(std::max(rank, 0))];
    if (!whole) {
      const double share = std::max(1, rank >= 0 ? chunks[static_cast<std::size_t>(rank)] : 1);
      cost               = {cost.F / share, cost.I / share, cost.W / share, cost.COMM};
    }
    out.push_back(cost);
  }
  return out;
}

ScheduleGraph schedule_graph(const PipelineSchedule& schedule, const std::vector<Costs>& costs) {
  const std::vector<Costs> of_stages = stage_costs(schedule, costs);
  if (validate(schedule).has_transfers) return Builder(schedule, of_stages).build(schedule);
  const PipelineSchedule lowered = with_send_recv(schedule);
  return Builder(lowered, of_stages).build(schedule);
}

Machine schedule_machine(int num_ranks) {
  Machine machine(num_ranks);
  machine.rate(NodeKind::compute, {.flops_per_s = 1});
  machine.rate(NodeKind::communicate, {.flops_per_s = 1});
  return machine;
}

}  // namespace stepgraph
