#include "graphs/train/trainer.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "engine/base/dispatch.hpp"
#include "engine/base/error.hpp"
#include "engine/run/packed.hpp"
#include "graphs/models/weights.hpp"
#include "graphs/train/run_state.hpp"
#include "graphs/train/shared_choice.hpp"
#include "graphs/train/shared_split.hpp"
#include "graphs/train/window_run.hpp"

namespace stepgraph {
namespace {

// The ranks of this process. Checked before a step is built: its messages know only the ranks of the layout.
RankSet ranks_of(const Plan& plan, const World& world) {
  require_ranks(Layout(plan.layout), world);
  return world.local_ranks();
}

std::optional<OffloadRates> rates_of(const World& world, const std::optional<OffloadRates>& measured = {}) {
  if (world.device() == nullptr) return std::nullopt;
  return measured.value_or(usual_offload_rates);
}

// The last run has left gradients that the next one reduces.
bool has_gradients(const StepRun& run) {
  return !std::isnan(run.memory().first<double>(run.step().ranks.front().sets[1].scale));
}

World& checked(const Plan& plan, World& world) {
  if (plan.update.mode == UpdateWhen::asynchronous) check_asynchronous_world(world);
  return world;
}

}  // namespace

Trainer::Trainer(const Model& model, const Plan& plan, const BatchSpec& batch, World& world,
                 const TrainerOptions& options)
    : plan_(with_shared_split(model, plan, batch, world.peers(),  // evaluation has the same stages
                              {.machine = options.machine, .on_search = options.on_search})),
      options_(options),
      world_(&checked(plan, world)),
      schedule_(plan.optimizer.schedule),
      seed_(options.seed) {
  options_.on_search = {};  // it may refer to what does not live as long
  run_               = make_run(make_step(model, plan_, batch, options.window));
}

StepGraph Trainer::make_step(const Model& model, const Plan& plan, const BatchSpec& batch, int window) const {
  const StepOptions own{.keep_gradients      = options_.keep_gradients,
                        .update_first        = options_.update_first,
                        .seed                = options_.seed,
                        .only                = ranks_of(plan, *world_),
                        .join_tied_first     = !world_->reduces_in_order(),
                        .machine             = options_.machine,
                        .simulator           = options_.simulator,
                        .issue_order         = world_->issue_order(),
                        .workspaces          = workspace_needs(*world_),
                        .offload_rates       = rates_of(*world_, options_.offload_rates),
                        .device_memory_bytes = device_memory_bytes(*world_),
                        .window              = window};
  StepGraph step = training_step(model, plan, batch, with_shared_choice(model, plan, batch, world_->peers(), own));
  if (options_.change) step.graph = options_.change(step.graph);
  return step;
}

std::unique_ptr<StepRun> Trainer::make_run(StepGraph step) const {
  return std::make_unique<StepRun>(std::move(step), *world_,
                                   RunOptions{.threads       = options_.threads,
                                              .step_timeout  = options_.step_timeout,
                                              .stall_timeout = options_.stall_timeout,
                                              .reuse         = plan_.reuse,
                                              .storage       = options_.storage});
}

int Trainer::set_update_mode(const UpdatePlan& update) {
  check_update(update);
  Plan plan   = plan_;
  plan.update = update;
  if (update == plan_.update) return 0;
  static_cast<void>(checked(plan, *world_));
  flush();
  // If it throws, nothing has changed yet.
  StepGraph made       = make_step(run_->step().model, plan, run_->step().batch, options_.window);
  const int waiting    = run_->num_waiting();
  const RunState state = take_state(*run_);
  StepGraph before     = run_->step();
  // The memory of both runs might not fit at the same time.
  last_norm_.reset();
  windows_.reset();
  run_.reset();
  ++num_replaced_;
  try {
    in_all(world_->peers(), "another update mode", [&] { run_ = make_run(std::move(made)); });
  } catch (...) {
    run_.reset();  // another process has failed
    run_ = make_run(std::move(before));
    put_state(*run_, state);
    throw;
  }
  put_state(*run_, state);
  plan_ = plan;
  return waiting;
}

void Trainer::start_weights() {
  if (!run_->has_weights()) set_fresh_weights(*run_, seed_);
}

void Trainer::set_total_steps(std::int64_t total) { schedule_ = with_total_steps(plan_.optimizer.schedule, total); }

std::int64_t Trainer::num_updates() const {
  return run_->memory().first<std::int64_t>(run_->step().ranks.front().num_updates);
}

void Trainer::set_num_updates(std::int64_t done) {
  for (const StepRank& rank : run_->step().ranks) run_->memory().set_first(rank.num_updates, done);
}

double Trainer::rate() const { return rates(num_steps_).front(); }

std::vector<double> Trainer::rates(std::int64_t step) const {
  const OptimizerPlan& optimizer = plan_.optimizer;
  if (fixed_rate_) return rates_of(optimizer, *fixed_rate_);
  if (schedule_.kind != RateKind::constant && schedule_.steps == 0)
    throw Error(ErrorKind::config, str("optimizer.schedule.steps: missing with kind ", schedule_.kind,
                                       " (a number of steps, or Trainer::set_total_steps)"));
  const double factor = rate_factor(schedule_, step);
  std::vector<double> rates{optimizer.lr * factor};
  for (const OptimizerGroup& group : optimizer.groups) rates.push_back(group.lr.value_or(optimizer.lr) * factor);
  return rates;
}

StepResult Trainer::step(std::span<const std::int32_t> tokens, Recorder* recorder) {
  run_->set_tokens(tokens);
  if (is_asynchronous()) return run_window(tokens.first(tokens.size() - 1), tokens.last(tokens.size() - 1), recorder);
  return run_step(recorder);
}

StepResult Trainer::step(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets,
                         Recorder* recorder) {
  run_->set_tokens(inputs, targets);
  if (is_asynchronous()) return run_window(inputs, targets, recorder);
  return run_step(recorder);
}

// A window of one step.
StepResult Trainer::run_window(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets,
                               Recorder* recorder) {
  const Batch batch{.inputs  = std::vector<std::int32_t>(inputs.begin(), inputs.end()),
                    .targets = std::vector<std::int32_t>(targets.begin(), targets.end())};
  return steps(std::span(&batch, 1), recorder).front();
}

StepGraph Trainer::make_window(int steps) const {
  return make_step(run_->step().model, plan_, run_->step().batch, steps);
}

void Trainer::prepare_steps(std::size_t count) {
  if (!is_asynchronous()) return;
  if (!windows_) windows_ = std::make_shared<WindowRuns>();
  const auto make        = [this](int window) { return make_window(window); };
  const std::size_t most = run_->step().window.size();
  if (count >= most) windows_->prepare(*run_, make, most);
  if (count % most != 0) windows_->prepare(*run_, make, count % most);
}

StepView Trainer::recorded() const { return windows_ ? windows_->recorded(*run_) : run_->view(); }

std::vector<StepResult> Trainer::steps(std::span<const Batch> batches, Recorder* recorder) {
  std::vector<StepResult> results;
  if (!is_asynchronous()) {
    for (const Batch& batch : batches) results.push_back(step(batch, recorder));
    return results;
  }
  run_->require_intact();
  if (!windows_) windows_ = std::make_shared<WindowRuns>();
  start_weights();
  while (!batches.empty()) {
    const std::size_t count = std::min(batches.size(), run_->step().window.size());
    std::vector<WindowStep> given;
    for (std::size_t i = 0; i < count; ++i) {
      run_->set_tokens(batches[i].inputs, batches[i].targets);  // checks their sizes
      given.push_back({.inputs  = batches[i].inputs,
                       .targets = batches[i].targets,
                       .rates   = rates(num_steps_ + static_cast<std::int64_t>(i))});
    }
    for (StepResult& result : windows_->run(
             *run_, [this](int window) { return make_window(window); }, given, num_steps_, recorder))
      results.push_back(result);
    grad_norm_ = results.back().grad_norm;
    num_steps_ += static_cast<std::int64_t>(count);
    batches = batches.subspan(count);
  }
  return results;
}

StepResult Trainer::run_step(Recorder* recorder) {
  run_->require_intact();  // before numbers of steps and updates change
  const std::vector<double> rates = this->rates(num_steps_);
  start_weights();
  // With loss scaling, and with a delayed update, the step counts its updates.
  const bool delays          = plan_.update.delays();
  const bool counts          = !plan_.precision.scales() && !delays;
  const std::int64_t updates = counts ? num_updates() : 0;
  const auto prepare_update  = [&] {
    for (const StepRank& rank : run_->step().ranks) run_->memory().write(rank.rate, std::span<const double>(rates));
    if (counts) set_num_updates(updates + 1);
  };
  for (const StepRank& rank : run_->step().ranks) run_->memory().set_first(rank.step_number, num_steps_ + 1);
  const bool has_earlier  = delays && has_gradients(*run_);
  const bool update_first = run_->step().update_first;  // the run begins with the update of the step before
  if (!update_first) prepare_update();
  run_->run(recorder);
  if (update_first) prepare_update();
  if (counts && !std::isfinite(run_->grad_norm())) set_num_updates(updates);  // nothing is updated
  ++num_steps_;
  StepResult result{.loss       = run_->loss(),
                    .grad_norm  = run_->grad_norm(),
                    .rate       = rates.front(),
                    .loss_scale = run_->loss_scale(),
                    .skipped    = run_->skipped()};
  grad_norm_ = delays ? std::nan("") : result.grad_norm;
  if (!delays) return result;
  if (has_earlier) result.earlier_norm = result.grad_norm;
  result.grad_norm    = std::nan("");
  result.skipped      = false;
  result.norm_is_late = true;
  return result;
}

Evaluator::Evaluator(const Model& model, const Plan& plan, const BatchSpec& batch, World& world,
                     const RunOptions& options)
    : batch_(batch),
      run_(std::make_unique<StepRun>(forward_step(model, plan, batch, ForwardResult::loss,
                                                  {.only                = ranks_of(plan, world),
                                                   .machine             = options.machine,
                                                   .issue_order         = world.issue_order(),
                                                   .workspaces          = workspace_needs(world),
                                                   .offload_rates       = rates_of(world),
                                                   .device_memory_bytes = device_memory_bytes(world)}),
                                     world, options)) {}

Evaluator::Evaluator(Trainer& trainer, const BatchSpec& batch) : trainer_(&trainer), batch_(batch) { use_trainer(); }

void Evaluator::use_trainer() {
  if (trainer_ == nullptr || (run_ && num_replaced_ == trainer_->num_replaced())) return;
  const StepRun& owner          = *trainer_->run_;
  const TrainerOptions& options = trainer_->options_;
  run_.reset();
  run_ = std::make_unique<StepRun>(forward_step(owner.step().model, trainer_->plan_, batch_, ForwardResult::loss,
                                                {.only        = owner.step().graph.ranks(),
                                                 .machine     = options.machine,
                                                 .issue_order = owner.world().issue_order(),
                                                 .workspaces  = workspace_needs(owner.world()),
                                                 .offload     = owner.step().offload.amounts,
                                                 .offload_of  = owner.step().offload.amounts_of}),
                                   owner,
                                   RunOptions{.threads       = options.threads,
                                              .step_timeout  = options.step_timeout,
                                              .stall_timeout = options.stall_timeout,
                                              .reuse         = trainer_->plan_.reuse,
                                              .storage       = options.storage});
  num_replaced_ = trainer_->num_replaced();
}

double Evaluator::run_batch() {
  if (trainer_ != nullptr) trainer_->start_weights();
  run_->run();
  return run_->loss();
}

double Evaluator::loss(std::span<const std::int32_t> tokens) {
  use_trainer();
  run_->set_tokens(tokens);
  return run_batch();
}

double Evaluator::loss(std::span<const std::int32_t> inputs, std::span<const std::int32_t> targets) {
  use_trainer();
  run_->set_tokens(inputs, targets);
  return run_batch();
}

double mean_loss(Evaluator& evaluator, const Batches& batches, std::int64_t num_steps) {
  const std::int64_t steps  = std::min(num_steps, batches.num_steps().value_or(num_steps));
  const std::int64_t global = evaluator.run().step().batch.global;
  double sum                = 0;
  std::int64_t counted      = 0;
  for (std::int64_t step = 0; step < steps; ++step) {
    Batch batch;
    in_all(evaluator.run().peers(), "a batch for validation", [&] { batch = batches.read(step * global); });
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
                         .offload_rates       = rates_of(world),
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
