#include "graphs/step/builder/builder.hpp"

#include "engine/base/error.hpp"
#include "graphs/models/weights.hpp"
#include "ops/layers/cross_entropy.hpp"
#include "ops/transfers/reduce.hpp"
#include "ops/updates/scaled_sum.hpp"

namespace stepgraph {

StepBuilder::StepBuilder(StepSetup& setup, Rank rank)
    : setup_(setup), rank_(rank), coord_(setup.step.layout.coord(rank)) {
  tp_ = {.size = setup.plan.layout.tp, .index = coord_.tp, .group = {}, .sequence = setup.sequence_parallel()};
  if (tp_.size > 1) tp_.group = setup.group(rank, Axis::tp, "tp");
  shard_group_ = shard_group(setup.plan, coord_.dp);
}

Buffer StepBuilder::make(std::string name, std::int64_t elements, DType type, Lifetime lifetime, MemoryRole role,
                         Space space) {
  const Buffer buffer            = graph().buffer({.name       = std::move(name),
                                                   .rank       = rank_,
                                                   .size_bytes = elements * static_cast<std::int64_t>(size_bytes(type)),
                                                   .type       = type,
                                                   .space      = space,
                                                   .lifetime   = lifetime});
  std::vector<MemoryRole>& roles = setup_.step.roles;
  roles.resize(buffer.id, MemoryRole::activations);  // buffers that tapes have made since
  roles.push_back(role);
  return buffer;
}

void StepBuilder::mark_since(std::uint32_t first, MemoryRole role) {
  std::vector<MemoryRole>& roles = setup_.step.roles;
  if (roles.size() < first) roles.resize(first, MemoryRole::activations);
  roles.resize(graph().num_buffers(), role);
}

void StepBuilder::declare_inputs(bool trains, ForwardResult result) {
  StepRank& rank = here();
  for (int mb = 0; mb < setup_.step.num_microbatches; ++mb) {
    if (has(Stage{0})) {
      rank.tokens.push_back(make(str("tokens mb", mb), setup_.num_tokens(), DType::i32, Lifetime::persistent));
    }
    if (has(last_stage()) && result == ForwardResult::loss) {
      rank.targets.push_back(make(str("targets mb", mb), setup_.num_tokens(), DType::i32, Lifetime::persistent));
    }
  }
  if (has(last_stage()) && result == ForwardResult::loss) {
    losses_          = make("losses", setup_.step.num_microbatches, DType::f64, Lifetime::step);
    rank.loss        = make("loss", 1, DType::f64, Lifetime::persistent);
    rank.num_ignored = make("ignored targets", 1, DType::i64, Lifetime::persistent);
  }
  if (!trains) return;
  rank.grad_norm   = make("grad_norm", 1, DType::f64, Lifetime::persistent);
  rank.step_number = make("step", 1, DType::i64, Lifetime::persistent);
  rank.rate        = make("rate", 1 + std::ssize(setup_.plan.optimizer.groups), DType::f64, Lifetime::persistent);
  rank.num_updates = make("updates", 1, DType::i64, Lifetime::persistent);
  if (setup_.options.update_first) rank.factor = make("clip factor", 1, DType::f64, Lifetime::persistent);
  if (delays()) declare_sets();
  if (!setup_.plan.precision.scales()) return;
  rank.loss_scale = make("loss scale", 1, DType::f64, Lifetime::persistent);
  rank.good_steps = make("good steps", 1, DType::i64, Lifetime::persistent);
  rank.skipped    = make("skipped", 1, DType::i64, Lifetime::persistent);
}

void StepBuilder::forward(const Action& action, ForwardResult result) {
  const int s = index(action.stage), mb = index(action.microbatch);
  const bool trains      = here().grad_norm != Buffer{};
  const BatchSpec& batch = setup_.step.batch;
  RandomStream random{.seed           = setup_.options.seed,
                      .first_sequence = setup_.options.first_sequence +
                                        coord_.dp * (batch.global / setup_.plan.layout.dp) +
                                        std::int64_t{mb} * batch.micro};
  if (trains) random.step = here().step_number;
  Work& work = work_[key(action)];
  work.tape  = std::make_unique<Tape>(TapeSpec{.graph      = &graph(),
                                               .weights    = &table_,
                                               .rank       = rank_,
                                               .type       = setup_.step.type,
                                               .tp         = tp_,
                                               .sequences  = batch.micro,
                                               .seq        = batch.seq,
                                               .stage      = s,
                                               .microbatch = mb,
                                               .random     = random,
                                               .records    = trains});
  Tape& tape = *work.tape;
  if (s == 0) {
    work.input = tape.input(here().tokens[static_cast<std::size_t>(mb)], {setup_.num_tokens()}, DType::i32, false);
  } else {
    const auto received = received_.find(key(action));  // else the stage before is on this rank
    const Buffer from   = received != received_.end() ? received->second : work_.at({s - 1, mb}).output.buffer;
    work.input          = tape.input(from, {setup_.activation_rows(), setup_.step.model.width}, setup_.step.type, true);
  }
  Tensor x = work.input;
  for (const std::size_t block : setup_.blocks_of_stage[static_cast<std::size_t>(s)]) {
    tape.set_layer(setup_.step.model.blocks[block].layer);
    tape.set_block(setup_.step.model.blocks[block].name);
    if (trains && setup_.options.update_first) update_block(block);
    x = setup_.step.model.blocks[block].forward(tape, x);
  }
  work.output = x;
  if (setup_.is_last(action.stage)) loss_of(tape, x, mb, result);
  if (!trains && s > 0) work_.erase({s - 1, mb});
}

void StepBuilder::loss_of(Tape& tape, const Tensor& logits, int microbatch, ForwardResult result) {
  const IndexRange vocab     = tp_range(setup_.step.model.vocab, tp_.size, tp_.index);
  const std::int64_t columns = vocab.end - vocab.begin;
  if (logits.cols() != columns || logits.rows() != setup_.num_tokens()) {
    throw Error(ErrorKind::config, str("model: the last block returns ", to_string(logits.shape), " (logits of shape ",
                                       setup_.num_tokens(), "x", columns, ")"));
  }
  tape.set_layer(-1);
  if (result == ForwardResult::logits) {
    const Buffer kept = make(str("logits mb", microbatch), logits.num_elements(), logits.type, Lifetime::persistent,
                             MemoryRole::activations);
    here().logits.push_back(kept);
    copy(graph(), {.name = str("keep logits mb", microbatch), .to = kept, .from = logits, .labels = tape.labels()});
    return;
  }
  const Tensor targets =
      tape.input(here().targets[static_cast<std::size_t>(microbatch)], {setup_.num_tokens()}, DType::i32, false);
  // Gradients are of the mean over all targets that count. With Reduction::sum they are of the sum of the data-parallel
  // ranks' means.
  const double replicas = setup_.plan.shard.reduction == Reduction::sum ? setup_.plan.layout.dp : 1;
  const bool scales     = here().loss_scale != Buffer{};
  cross_entropy(tape, {.logits      = logits,
                       .targets     = targets,
                       .loss        = losses_.range(8 * microbatch, 8),
                       .scale       = replicas,
                       .vocab_begin = vocab.begin,
                       .in_place    = setup_.step.model.logits_are_free,
                       .loss_scale  = scales ? std::optional<Access>(here().loss_scale) : std::nullopt,
                       .counted     = counted_targets()});
}

// Sets the gradient of a stage's output, before its backward pass.
void StepBuilder::begin_backward(const Action& action) {
  if (setup_.is_last(action.stage)) return;
  Work& work = work_.at(key(action));
  if (const auto received = received_gradient_.find(key(action)); received != received_gradient_.end()) {
    const Tensor gradient = work.tape->input(received->second, work.output.shape, work.output.type, false);
    work.tape->set_gradient(work.output, gradient);
    return;
  }
  const Work& next = work_.at({index(action.stage) + 1, index(action.microbatch)});
  work.tape->set_gradient(work.output, next.tape->gradient(next.input));
}

void StepBuilder::transfer(const Action& action) {
  const int s = index(action.stage), mb = index(action.microbatch);
  const bool forwards = action.kind == ActionKind::send_forward || action.kind == ActionKind::recv_forward;
  const bool sends    = action.kind == ActionKind::send_forward || action.kind == ActionKind::send_backward;
  // The stages that send and receive.
  const int from = forwards ? (sends ? s : s - 1) : (sends ? s : s + 1), to = forwards ? from + 1 : from - 1;
  const Rank sender = setup_.rank_of(Stage{from}, coord_), receiver = setup_.rank_of(Stage{to}, coord_);
  const Group group           = setup_.transfer_group(from, to, coord_);
  const DType type            = setup_.step.type;
  const std::int64_t elements = setup_.activation_rows() * setup_.step.model.width;
  const std::string what      = forwards ? "activation" : "gradient";
  PartNode node{.name    = str(sends ? "send " : "recv ", what, " s", from, " to s", to, " mb", mb),
                .rank    = rank_,
                .lane    = sends ? LaneKind::pp_send : LaneKind::pp_recv,
                .group   = group,
                .op      = sends ? PartOp::send : PartOp::recv,
                .type    = type,
                .peer    = sends ? receiver : sender,
                .message = str(what, " s", from, " mb", mb),
                .bytes   = elements * static_cast<std::int64_t>(size_bytes(type)),
                .labels  = {.stage = s, .microbatch = mb, .phase = forwards ? "forward" : "backward"}};
  if (sends) {
    const Work& work = work_.at(key(action));
    node.reads       = forwards ? work.output : work.tape->gradient(work.input);
  } else {
    const Buffer buffer =
        make(str("received ", what, " s", s, " mb", mb), elements, type, Lifetime::step, MemoryRole::activations);
    (forwards ? received_ : received_gradient_)[key(action)] = buffer;
    node.writes                                              = buffer;
  }
  add_part(graph(), node);
}

void StepBuilder::act(const Action& action, ForwardResult result) {
  switch (action.kind) {
    case ActionKind::forward:
      return forward(action, result);
    case ActionKind::input_gradient:
      begin_backward(action);
      return work_.at(key(action)).tape->emit_input_gradients();
    case ActionKind::weight_gradient:
      begin_gradients(action);
      work_.at(key(action)).tape->emit_weight_gradients();
      return end_gradients(action);
    case ActionKind::backward:
      begin_backward(action);
      begin_gradients(action);
      work_.at(key(action)).tape->emit_gradients();
      return end_gradients(action);
    case ActionKind::reduce_grad:
      check_all_used(action.stage);
      if (!delays()) reduce_gradients(action.stage);
      return;
    case ActionKind::send_forward:
    case ActionKind::recv_forward:
    case ActionKind::send_backward:
    case ActionKind::recv_backward:
      return transfer(action);
    case ActionKind::unshard:
    case ActionKind::reshard:
      // Weights stay gathered in between: marks for with_slots.
      if (here().grad_norm != Buffer{} && setup_.options.update_first) update_stage(action.stage);
      graph().add({.name   = to_string(action),
                   .op     = std::string(action.kind == ActionKind::unshard ? unshard_mark : reshard_mark),
                   .labels = {.stage = index(action.stage)},
                   .rank   = rank_});
      return;
  }
}

// Of the whole batch: a rank's share of the mean is over the targets of all data-parallel ranks.
CountedTargets StepBuilder::counted_targets() {
  const BatchSpec& batch = setup_.step.batch;
  return {.all = std::int64_t{batch.global} * batch.seq, .ignored = here().num_ignored};
}

// The mean loss: summed over microbatches in order, then over data-parallel ranks in order.
void StepBuilder::sum_losses() {
  if (!has(last_stage())) return;
  const CountedTargets counted = counted_targets();
  scaled_sum(graph(), {.name    = "mean loss",
                       .op      = "mean_loss",
                       .values  = losses_,
                       .to      = here().loss,
                       .labels  = {.phase = "loss"},
                       .counted = counted});
  if (setup_.plan.layout.dp > 1) {
    all_reduce("all_reduce loss", setup_.group(rank_, Axis::dp, "loss"), setup_.plan.layout.dp, here().loss,
               {.phase = "loss"});
  }
}

void StepBuilder::training() {
  declare_inputs(true, ForwardResult::loss);
  declare_weights(true);
  if (updates_early()) static_cast<void>(no_clipping());
  // No lane orders the nodes of the schedule behind a reduction that comes before them, so the reduction of earlier
  // gradients has the whole step.
  if (delays()) reduce_earlier();
  const auto& row = setup_.step.schedule.rows[static_cast<std::size_t>(coord_.pp)];
  for (const Action& action : row) act(action, ForwardResult::loss);
  sum_losses();
  if (!delays()) join_tied_weights();
  add_norm();
  delays() ? count_applied() : add_loss_scale();
  if (!setup_.options.update_first) add_updates();
  if (delays()) shift_sets();
}

void StepBuilder::forward_only(ForwardResult result) {
  declare_inputs(false, result);
  declare_weights(false);
  const auto& row = setup_.step.schedule.rows[static_cast<std::size_t>(coord_.pp)];
  for (const Action& action : row) act(action, result);
  if (result == ForwardResult::loss) sum_losses();
}

}  // namespace stepgraph
