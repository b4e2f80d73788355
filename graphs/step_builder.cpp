#include "graphs/step_builder.hpp"

#include "engine/error.hpp"
#include "graphs/weights.hpp"
#include "ops/cross_entropy.hpp"
#include "ops/reduce.hpp"

namespace stepgraph {

StepBuilder::StepBuilder(StepSetup& setup, Rank rank)
    : setup_(setup), rank_(rank), coord_(setup.step.layout.coord(rank)) {
  tp_ = {.size = setup.plan.layout.tp, .index = coord_.tp, .group = {}, .sequence = setup.shares_rows()};
  if (tp_.size > 1) tp_.group = setup.group(rank, Axis::tp, "tp");
}

Buffer StepBuilder::make(std::string name, std::int64_t elements, DType type, Lifetime lifetime) {
  return graph().buffer({.name       = std::move(name),
                         .rank       = rank_,
                         .size_bytes = elements * static_cast<std::int64_t>(size_bytes(type)),
                         .type       = type,
                         .lifetime   = lifetime});
}

void StepBuilder::declare_inputs(bool trains, ForwardResult result) {
  StepRank& rank = here();
  for (int mb = 0; mb < setup_.step.num_microbatches; ++mb) {
    if (has(Stage{0})) {
      rank.tokens.push_back(make(str("tokens mb", mb), setup_.rows(), DType::i32, Lifetime::persistent));
    }
    if (has(last_stage()) && result == ForwardResult::loss) {
      rank.targets.push_back(make(str("targets mb", mb), setup_.rows(), DType::i32, Lifetime::persistent));
    }
  }
  if (has(last_stage()) && result == ForwardResult::loss) {
    losses_   = make("losses", setup_.step.num_microbatches, DType::f64, Lifetime::step);
    rank.loss = make("loss", 1, DType::f64, Lifetime::persistent);
  }
  if (!trains) return;
  rank.grad_norm = make("grad_norm", 1, DType::f64, Lifetime::persistent);
  rank.step      = make("step", 1, DType::i64, Lifetime::persistent);
  rank.rate      = make("rate", 1, DType::f64, Lifetime::persistent);
  if (!setup_.plan.precision.scales()) return;
  rank.loss_scale  = make("loss scale", 1, DType::f64, Lifetime::persistent);
  rank.num_updates = make("updates", 1, DType::i64, Lifetime::persistent);
  rank.good_steps  = make("good steps", 1, DType::i64, Lifetime::persistent);
  rank.skipped     = make("skipped", 1, DType::i64, Lifetime::persistent);
}

void StepBuilder::declare_weights(bool trains) {
  // A gradient that stays as it travelled is another buffer in the end.
  const bool kept         = setup_.options.keep_gradients && !keeps_rounded_gradients();
  const Lifetime gradient = kept ? Lifetime::persistent : Lifetime::step;
  for (int s = 0; s < setup_.num_stages(); ++s) {
    if (!has(Stage{s})) continue;
    for (const std::size_t block : setup_.blocks_of_stage[static_cast<std::size_t>(s)]) {
      const std::vector<WeightSpec>& specs = setup_.step.model.blocks[block].weights;
      for (std::size_t number = 0; number < specs.size(); ++number) {
        const WeightSpec& spec = specs[number];
        const DType type       = spec.norm ? setup_.plan.precision.norm_type() : setup_.step.type;
        StepWeight weight{.block = block, .number = number, .stage = Stage{s}, .tied = !spec.tied_to.empty()};
        const TensorShape shape     = local_shape(spec, tp_.size, tp_.index);
        const std::int64_t elements = num_elements(shape);
        // A tied weight shares the value of the weight it is tied to, where that is on this rank, and its update.
        const bool shares = weight.tied && has(setup_.stage_of_weight.at(spec.tied_to));
        weight.value = shares ? table_.find(spec.tied_to).value : make(spec.name, elements, type, Lifetime::persistent);
        if (trains) {
          const DType sums = wide_type(type);
          weight.gradient  = make("gradient of " + spec.name, elements, sums, gradient);
          if (!shares) {
            const bool adam = setup_.plan.optimizer.kind == OptimizerKind::adamw;
            if (sums != type) weight.master = make("master of " + spec.name, elements, sums, Lifetime::persistent);
            weight.first =
                make(str(adam ? "mean of " : "velocity of ", spec.name), elements, sums, Lifetime::persistent);
            if (adam) weight.second = make("square of " + spec.name, elements, sums, Lifetime::persistent);
          }
        }
        table_.add({.name = spec.name, .shape = shape, .value = weight.value, .gradient = weight.gradient});
        here().weights.push_back(weight);
      }
    }
  }
}

void StepBuilder::forward(const Action& action, ForwardResult result) {
  const int s = index(action.stage), mb = index(action.microbatch);
  const bool trains      = here().grad_norm != Buffer{};
  const BatchSpec& batch = setup_.step.batch;
  RandomStream random{
      .seed           = setup_.options.seed,
      .first_sequence = coord_.dp * (batch.global / setup_.plan.layout.dp) + std::int64_t{mb} * batch.micro};
  if (trains) random.step = here().step;
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
    work.input = tape.input(here().tokens[static_cast<std::size_t>(mb)], {setup_.rows()}, DType::i32, false);
  } else {
    const auto received = received_.find(key(action));  // else the stage before is this rank's own
    const Buffer from   = received != received_.end() ? received->second : work_.at({s - 1, mb}).output.buffer;
    work.input          = tape.input(from, {setup_.shared_rows(), setup_.step.model.width}, setup_.step.type, true);
  }
  Tensor x = work.input;
  for (const std::size_t block : setup_.blocks_of_stage[static_cast<std::size_t>(s)]) {
    tape.set_layer(setup_.step.model.blocks[block].layer);
    x = setup_.step.model.blocks[block].forward(tape, x);
  }
  work.output = x;
  if (setup_.is_last(action.stage)) loss_of(tape, x, mb, result);
  if (!trains && s > 0) work_.erase({s - 1, mb});
}

void StepBuilder::loss_of(Tape& tape, const Tensor& logits, int microbatch, ForwardResult result) {
  const CutRange vocab       = cut_range(setup_.step.model.vocab, tp_.size, tp_.index);
  const std::int64_t columns = vocab.end - vocab.begin;
  if (logits.cols() != columns || logits.rows() != setup_.rows()) {
    throw Error(ErrorKind::config, str("model: the last block returns ", to_string(logits.shape),
                                       " (wanted are logits, ", setup_.rows(), "x", columns, ")"));
  }
  tape.set_layer(-1);
  if (result == ForwardResult::logits) {
    const Buffer kept = make(str("logits mb", microbatch), logits.num_elements(), logits.type, Lifetime::persistent);
    here().logits.push_back(kept);
    copy(graph(), {.name = str("keep logits mb", microbatch), .to = kept, .from = logits, .labels = tape.labels()});
    return;
  }
  const BatchSpec& batch = setup_.step.batch;
  const Tensor targets =
      tape.input(here().targets[static_cast<std::size_t>(microbatch)], {setup_.rows()}, DType::i32, false);
  const bool scales = here().loss_scale != Buffer{};
  cross_entropy(tape, {.logits      = logits,
                       .targets     = targets,
                       .loss        = losses_.range(8 * microbatch, 8),
                       .scale       = 1.0 / (static_cast<double>(batch.global) * batch.seq),
                       .vocab_begin = vocab.begin,
                       .in_place    = setup_.step.model.logits_are_free,
                       .loss_scale  = scales ? std::optional<Access>(here().loss_scale) : std::nullopt});
}

// The gradient of a stage's output is there before its own backward begins.
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
  // The two stages, in the order of the message; and this one's peer.
  const int from = forwards ? (sends ? s : s - 1) : (sends ? s : s + 1), to = forwards ? from + 1 : from - 1;
  const Rank sender = setup_.rank_of(Stage{from}, coord_), receiver = setup_.rank_of(Stage{to}, coord_);
  const Group group           = setup_.transfer_group(from, to, coord_);
  const DType type            = setup_.step.type;
  const std::int64_t elements = setup_.shared_rows() * setup_.step.model.width;
  const std::string what      = forwards ? "activation" : "gradient";
  NodeSpec node{.name   = str(sends ? "send " : "recv ", what, " s", from, " to s", to, " mb", mb),
                .lane   = graph().lane(rank_, sends ? LaneKind::pp_send : LaneKind::pp_recv),
                .part   = PartSpec{.group   = group,
                                   .op      = sends ? PartOp::send : PartOp::recv,
                                   .type    = type,
                                   .peer    = sends ? receiver : sender,
                                   .message = str(what, " s", from, " mb", mb)},
                .kind   = NodeKind::communicate,
                .op     = sends ? "send" : "recv",
                .labels = {.stage = s, .microbatch = mb, .phase = forwards ? "forward" : "backward"}};
  const auto bytes = static_cast<double>(elements) * static_cast<double>(size_bytes(type));
  node.cost        = {.bytes_moved = bytes, .bytes_sent = sends ? bytes : 0};
  if (sends) {
    const Work& work = work_.at(key(action));
    node.reads       = forwards ? work.output : work.tape->gradient(work.input);
  } else {
    const Buffer buffer = make(str("received ", what, " s", s, " mb", mb), elements, type, Lifetime::step);
    (forwards ? received_ : received_gradient_)[key(action)] = buffer;
    node.writes                                              = buffer;
  }
  graph().add(node);
}

void StepBuilder::act(const Action& action, ForwardResult result) {
  switch (action.kind) {
    case ActionKind::forward:
      return forward(action, result);
    case ActionKind::input_gradient:
      begin_backward(action);
      return work_.at(key(action)).tape->emit_input_gradients();
    case ActionKind::weight_gradient:
      return work_.at(key(action)).tape->emit_weight_gradients();
    case ActionKind::backward:
      begin_backward(action);
      return work_.at(key(action)).tape->emit_gradients();
    case ActionKind::reduce_grad:
      return reduce_gradients(action.stage);
    case ActionKind::send_forward:
    case ActionKind::recv_forward:
    case ActionKind::send_backward:
    case ActionKind::recv_backward:
      return transfer(action);
    case ActionKind::unshard:
    case ActionKind::reshard:
      break;  // weights are whole here
  }
}

// The mean loss: microbatches in their order, then data-parallel ranks in theirs.
void StepBuilder::sum_losses() {
  if (!has(last_stage())) return;
  const BatchSpec& batch = setup_.step.batch;
  const double scale     = 1.0 / (static_cast<double>(batch.global) * batch.seq);
  graph().add(
      {.name = "mean loss", .reads = losses_, .writes = here().loss, .op = "mean_loss", .labels = {.phase = "loss"}},
      [scale](const Context& context) {
        double sum = 0;
        for (const double loss : context.read<double>()) sum += loss;
        context.write<double>()[0] = sum * scale;
      });
  if (setup_.plan.layout.dp > 1) {
    all_reduce_part("all_reduce loss", setup_.group(rank_, Axis::dp, "loss"), setup_.plan.layout.dp, here().loss,
                    DType::f64, LaneKind::reduce, {.phase = "loss"});
  }
}

void StepBuilder::training() {
  declare_inputs(true, ForwardResult::loss);
  declare_weights(true);
  const auto& row = setup_.step.schedule.rows[static_cast<std::size_t>(coord_.pp)];
  for (const Action& action : row) act(action, ForwardResult::loss);
  sum_losses();
  join_tied_weights();
  add_norm();
  add_updates();
}

void StepBuilder::forward_only(ForwardResult result) {
  declare_inputs(false, result);
  declare_weights(false);
  const auto& row = setup_.step.schedule.rows[static_cast<std::size_t>(coord_.pp)];
  for (const Action& action : row) act(action, result);
  if (result == ForwardResult::loss) sum_losses();
}

namespace {

// What cannot be addressed is refused here, before sums of sizes overflow.
void check_size(const Graph& graph) {
  std::vector<double> bytes(static_cast<std::size_t>(graph.num_ranks()));
  for (std::uint32_t i = 0; i < graph.num_buffers(); ++i) {
    const BufferSpec& buffer = graph.spec(Buffer{i});
    double& sum              = bytes[static_cast<std::size_t>(index(buffer.rank))];
    sum += static_cast<double>(buffer.size_bytes);
    if (sum > 0x1p60) {
      throw Error(ErrorKind::config, str("step: rank ", buffer.rank, " would have buffers of ", sum,
                                         " bytes and more (a smaller model or batch)"));
    }
  }
}

StepGraph build(StepSetup setup, const auto& build_rank) {
  for (int rank = 0; rank < setup.step.layout.num_ranks(); ++rank) {
    if (setup.options.only && *setup.options.only != Rank{rank}) continue;
    StepBuilder builder(setup, Rank{rank});
    build_rank(builder);
  }
  check_size(setup.step.graph);
  const Plan& plan = setup.plan;
  setup.step.graph = recompute(setup.step.graph, plan.recompute);
  if (plan.algorithm == Algorithm::direct) return std::move(setup.step);
  const Machine usual = two_level_machine({.ranks          = setup.step.layout.num_ranks(),
                                           .ranks_per_node = plan.layout.devices_per_node,
                                           .inside         = {.latency_s = 2e-6, .bytes_per_s = 100e9},
                                           .between        = {.latency_s = 5e-6, .bytes_per_s = 25e9}});
  setup.step.graph    = expand_collectives(setup.step.graph,
                                           {.algorithm      = plan.algorithm,
                                            .ranks_per_node = plan.layout.devices_per_node,
                                            .machine = setup.options.machine != nullptr ? setup.options.machine : &usual});
  return std::move(setup.step);
}

}  // namespace

StepGraph training_step(const Model& model, const Plan& plan, const BatchSpec& batch, const StepOptions& options) {
  return build(StepSetup(model, plan, batch, true, options), [](StepBuilder& builder) { builder.training(); });
}

StepGraph forward_step(const Model& model, const Plan& plan, const BatchSpec& batch, ForwardResult result,
                       const StepOptions& options) {
  return build(StepSetup(model, plan, batch, false, options),
               [result](StepBuilder& builder) { builder.forward_only(result); });
}

}  // namespace stepgraph
