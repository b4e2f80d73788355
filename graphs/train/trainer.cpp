#include "graphs/train/trainer.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/run/packed.hpp"
#include "graphs/models/weights.hpp"

namespace stepgraph {
namespace {

// The ranks of this process. Checked before a step is built: its messages know only the ranks of the layout.
RankSet ranks_of(const Plan& plan, const World& world) {
  require_ranks(Layout(plan.layout), world);
  return world.local_ranks();
}

}  // namespace

Trainer::Trainer(const Model& model, const Plan& plan, const BatchSpec& batch, World& world,
                 const TrainerOptions& options)
    : plan_(plan),
      options_(options),
      run_(training_step(model, plan, batch,
                         {.keep_gradients      = options.keep_gradients,
                          .update_first        = options.update_first,
                          .seed                = options.seed,
                          .only                = ranks_of(plan, world),
                          .join_tied_first     = !world.reduces_in_order(),
                          .machine             = options.machine,
                          .issue_order         = world.issue_order(),
                          .workspaces          = workspace_needs(world),
                          .device_memory_bytes = device_memory_bytes(world)}),
           world,
           {.threads       = options.threads,
            .step_timeout  = options.step_timeout,
            .stall_timeout = options.stall_timeout,
            .reuse         = plan.reuse,
            .storage       = options.storage}),
      schedule_(plan.optimizer.schedule),
      seed_(options.seed) {}

void Trainer::start_weights() {
  if (!run_.has_weights()) set_fresh_weights(run_, seed_);
}

void Trainer::set_total_steps(std::int64_t total) { schedule_ = with_total_steps(plan_.optimizer.schedule, total); }

std::int64_t Trainer::num_updates() const {
  return run_.memory().first<std::int64_t>(run_.step().ranks.front().num_updates);
}

void Trainer::set_num_updates(std::int64_t done) {
  for (const StepRank& rank : run_.step().ranks) run_.memory().set_first(rank.num_updates, done);
}

double Trainer::rate() const { return rates().front(); }

std::vector<double> Trainer::rates() const {
  const OptimizerPlan& optimizer = plan_.optimizer;
  if (fixed_rate_) return rates_of(optimizer, *fixed_rate_);
  if (schedule_.kind != RateKind::constant && schedule_.steps == 0)
    throw Error(ErrorKind::config, str("optimizer.schedule.steps: missing with kind ", schedule_.kind,
                                       " (a number of steps, or Trainer::set_total_steps)"));
  const double factor = rate_factor(schedule_, num_steps_);
  std::vector<double> rates{optimizer.lr * factor};
  for (const OptimizerGroup& group : optimizer.groups) rates.push_back(group.lr.value_or(optimizer.lr) * factor);
  return rates;
}

StepResult Trainer::step(std::span<const std::int32_t> tokens, Recorder* recorder) {
  run_.set_tokens(tokens);
  return run_step(recorder);
}

StepResult Trainer::step(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets,
                         Recorder* recorder) {
  run_.set_tokens(inputs, targets);
  return run_step(recorder);
}

StepResult Trainer::run_step(Recorder* recorder) {
  const std::vector<double> rates = this->rates();
  start_weights();
  // With loss scaling the step counts its updates.
  const bool counts          = !plan_.precision.scales();
  const std::int64_t updates = counts ? num_updates() : 0;
  const auto prepare_update  = [&] {
    for (const StepRank& rank : run_.step().ranks) run_.memory().write(rank.rate, std::span<const double>(rates));
    if (counts) set_num_updates(updates + 1);
  };
  for (const StepRank& rank : run_.step().ranks) run_.memory().set_first(rank.step_number, num_steps_ + 1);
  const bool update_first = run_.step().update_first;  // the run begins with the update of the step before
  if (!update_first) prepare_update();
  run_.run(recorder);
  if (update_first) prepare_update();
  if (counts && !std::isfinite(run_.grad_norm())) set_num_updates(updates);  // nothing is updated
  ++num_steps_;
  return {.loss       = run_.loss(),
          .grad_norm  = run_.grad_norm(),
          .rate       = rates.front(),
          .loss_scale = run_.loss_scale(),
          .skipped    = run_.skipped()};
}

Evaluator::Evaluator(const Model& model, const Plan& plan, const BatchSpec& batch, World& world,
                     const RunOptions& options)
    : run_(forward_step(model, plan, batch, ForwardResult::loss,
                        {.only                = ranks_of(plan, world),
                         .machine             = options.machine,
                         .issue_order         = world.issue_order(),
                         .workspaces          = workspace_needs(world),
                         .device_memory_bytes = device_memory_bytes(world)}),
           world, options) {}

Evaluator::Evaluator(Trainer& trainer, const BatchSpec& batch)
    : trainer_(&trainer),
      run_(forward_step(trainer.run_.step().model, trainer.plan_, batch, ForwardResult::loss,
                        {.only        = trainer.run_.step().graph.ranks(),
                         .machine     = trainer.options_.machine,
                         .issue_order = trainer.run_.world().issue_order(),
                         .workspaces  = workspace_needs(trainer.run_.world()),
                         .offload     = trainer.run_.step().offload.amounts,
                         .offload_of  = trainer.run_.step().offload.amounts_of}),
           trainer.run_,
           {.threads       = trainer.options_.threads,
            .step_timeout  = trainer.options_.step_timeout,
            .stall_timeout = trainer.options_.stall_timeout,
            .reuse         = trainer.plan_.reuse,
            .storage       = trainer.options_.storage}) {}

double Evaluator::run_batch() {
  if (trainer_ != nullptr) trainer_->start_weights();
  run_.run();
  return run_.loss();
}

double Evaluator::loss(std::span<const std::int32_t> tokens) {
  run_.set_tokens(tokens);
  return run_batch();
}

double Evaluator::loss(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets) {
  run_.set_tokens(inputs, targets);
  return run_batch();
}

namespace {

// Throws the error of the first process that has one, in all processes.
void require_no_error(Peers* peers, std::string_view subject, const std::optional<Error>& mine) {
  if (peers == nullptr) {
    if (mine) throw *mine;
    return;
  }
  Packer sent;
  sent.add(mine ? static_cast<int>(mine->kind()) : -1);
  sent.add_text(mine ? mine->what() : "");
  std::optional<Error> first;
  for (const Bytes& bytes : peers->gather(subject, sent.take())) {
    Unpacker received(bytes);
    const int kind         = received.get<int>();
    const std::string text = received.get_text();
    if (kind >= 0 && !first) first.emplace(static_cast<ErrorKind>(kind), text);
  }
  peers->require_success(subject, first);
}

}  // namespace

double mean_loss(Evaluator& evaluator, const Batches& batches, std::int64_t num_steps) {
  const std::int64_t steps  = std::min(num_steps, batches.num_steps().value_or(num_steps));
  const std::int64_t global = evaluator.run().step().batch.global;
  double sum                = 0;
  std::int64_t counted      = 0;
  for (std::int64_t step = 0; step < steps; ++step) {
    Batch batch;
    std::optional<Error> unread;
    try {
      batch = batches.read(step * global);
    } catch (const Error& error) {
      unread = error;
    }
    require_no_error(evaluator.run().peers(), "a batch for validation", unread);
    const double loss = evaluator.loss(batch);
    sum += loss * static_cast<double>(evaluator.num_counted());
    counted += evaluator.num_counted();
  }
  return counted == 0 ? 0 : sum / static_cast<double>(counted);
}

// Every data-parallel rank gets the same prompt.
Generator::Generator(const Model& model, const Plan& plan, int window, World& world, const RunOptions& options)
    : run_(forward_step(model, plan, {.global = plan.layout.dp, .micro = 1, .seq = window}, ForwardResult::logits,
                        {.only                = ranks_of(plan, world),
                         .machine             = options.machine,
                         .issue_order         = world.issue_order(),
                         .workspaces          = workspace_needs(world),
                         .device_memory_bytes = device_memory_bytes(world)}),
           world, options) {}

namespace {

// Process 0 puts the logits of all processes together, and tells all.
std::vector<double> shared_logits(Peers& peers, std::vector<double> logits, Bytes mine) {
  for (const Bytes& bytes : peers.gather("logits", std::move(mine))) {
    for (Unpacker received(bytes); !received.empty();) {
      const auto begin                  = received.get<std::int64_t>();
      const std::vector<double> columns = received.get_list<double>();
      std::copy(columns.begin(), columns.end(), logits.begin() + static_cast<std::ptrdiff_t>(begin));
    }
  }
  const bool is_first = peers.process() == 0;
  const Bytes told =
      peers.broadcast("logits", is_first ? Packer().add_list(std::span<const double>(logits)).take() : Bytes());
  return Unpacker(told).get_list<double>();
}

}  // namespace

std::vector<double> Generator::logits(std::span<const std::int32_t> prompt) {
  const StepGraph& step = run_.step();
  const auto window     = static_cast<std::size_t>(step.batch.seq);
  if (prompt.empty() || prompt.size() > window) {
    throw Error(ErrorKind::config, str("generate: a prompt of ", prompt.size(), " tokens (1 to ", window, ")"));
  }
  // The tokens after the prompt do not influence its last position: attention is causal.
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(step.batch.global) * window + 1, 0);
  for (int copy = 0; copy < step.batch.global; ++copy) {
    std::copy(prompt.begin(), prompt.end(),
              tokens.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(copy) * window));
  }
  run_.set_tokens(tokens);
  run_.run();
  std::vector<double> logits(static_cast<std::size_t>(step.model.vocab));
  Packer sent;
  for (const StepRank& rank : step.ranks) {
    if (rank.logits.empty() || rank.coord.dp != 0) continue;
    const IndexRange vocab = tp_range(step.model.vocab, step.layout.degree(Axis::tp), rank.coord.tp);
    const auto columns     = static_cast<std::size_t>(vocab.end - vocab.begin);
    dispatch_float(step.type, [&]<class T>(T) {
      std::vector<T> row(columns);
      run_.memory().read(rank.logits[0], std::span(row), static_cast<std::int64_t>((prompt.size() - 1) * columns));
      std::transform(row.begin(), row.end(), logits.begin() + static_cast<std::ptrdiff_t>(vocab.begin),
                     [](T logit) { return static_cast<double>(wide(logit)); });
    });
    sent.add(vocab.begin);
    sent.add_list(std::span<const double>(logits).subspan(static_cast<std::size_t>(vocab.begin), columns));
  }
  return run_.peers() == nullptr ? logits : shared_logits(*run_.peers(), std::move(logits), sent.take());
}

std::vector<std::int32_t> Generator::generate(std::vector<std::int32_t> prompt, int num_tokens) {
  std::vector<std::int32_t> generated;
  const auto window = static_cast<std::size_t>(run_.step().batch.seq);
  for (int i = 0; i < num_tokens; ++i) {
    const std::size_t seen          = std::min(prompt.size(), window);
    const std::vector<double> found = logits(std::span(prompt).last(seen));
    const auto largest              = std::max_element(found.begin(), found.end());
    if (!std::all_of(found.begin(), found.end(), [](double logit) { return std::isfinite(logit); })) {
      throw Error(ErrorKind::run,
                  str("generate: a logit is ", *largest, " (weights that are finite, and not too large)"));
    }
    const auto best = static_cast<std::int32_t>(largest - found.begin());
    prompt.push_back(best);
    generated.push_back(best);
  }
  return generated;
}

}  // namespace stepgraph
